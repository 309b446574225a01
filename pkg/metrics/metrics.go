// Package metrics shows the driver to Prometheus: what calls cost and how they
// end, and how the pools are. It knows neither gRPC nor pools; others tell it.
package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// A Pool is what is shown of one.
type Pool struct {
	Name       string
	Serving    bool
	SystemDisk bool // on the filesystem of the operating system
	Enforced   bool // the kernel keeps the sizes of new volumes
	Volumes    int
	Promised   int64  // bytes
	Trash      int    // removed volumes that still occupy space
	Stuck      int    // those of them that could not be removed
	Restored   uint64 // limits that were put back
}

// Metrics are all that is shown.
type Metrics struct {
	registry *prometheus.Registry
	calls    *prometheus.HistogramVec
	panics   *prometheus.CounterVec
}

// callBuckets reach from the 50 µs of a statistics call to the seconds of a disk
// that is in trouble.
var callBuckets = []float64{
	50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1, 2.5, 5, 10, 30,
}

// New makes the metrics of a driver of that version, which asks pools at each scrape.
func New(version string, pools func() []Pool) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "hostpath_csi_call_duration_seconds",
			Help:    "Duration of CSI calls by method and gRPC code.",
			Buckets: callBuckets,
		}, []string{"method", "code"}),
		panics: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "hostpath_csi_panics_total",
			Help: "CSI calls that panicked and were answered with INTERNAL.",
		}, []string{"method"}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "hostpath_build_info",
		Help:        "Always 1; the label tells the version.",
		ConstLabels: prometheus.Labels{"version": version},
	})
	build.Set(1)
	m.registry.MustRegister(m.calls, m.panics, build, &poolCollector{pools: pools},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Call tells of one answered call.
func (m *Metrics) Call(method, code string, duration time.Duration) {
	m.calls.WithLabelValues(method, code).Observe(duration.Seconds())
}

// Panic tells of a handler that panicked.
func (m *Metrics) Panic(method string) { m.panics.WithLabelValues(method).Inc() }

// poolCollector makes series of pools when they are asked for.
type poolCollector struct{ pools func() []Pool }

// sharedWithOS is the one metric that users of the earlier driver have alerts on.
var sharedWithOS = prometheus.NewDesc("kubevirt_hpp_pool_path_shared_with_os",
	"1 if a pool shares its filesystem with the operating system.", nil, nil)

// perPool are the series with the label "pool".
var perPool = []struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(Pool) float64
}{
	{poolDesc("serving", "1 if the pool serves."), prometheus.GaugeValue, func(p Pool) float64 { return number(p.Serving) }},
	{poolDesc("quota_enforced", "1 if the kernel keeps the sizes of the pool's new volumes."), prometheus.GaugeValue, func(p Pool) float64 { return number(p.Enforced) }},
	{poolDesc("volumes", "Volumes in the pool."), prometheus.GaugeValue, func(p Pool) float64 { return float64(p.Volumes) }},
	{poolDesc("promised_bytes", "Bytes set aside for volumes."), prometheus.GaugeValue, func(p Pool) float64 { return float64(p.Promised) }},
	{poolDesc("limits_restored_total", "Limits of volumes that were missing or different, and were put back."), prometheus.CounterValue, func(p Pool) float64 { return float64(p.Restored) }},
	{poolDesc("trash_entries", "Removed volumes that still occupy space."), prometheus.GaugeValue, func(p Pool) float64 { return float64(p.Trash) }},
	{poolDesc("trash_stuck_entries", "Removed volumes that could not be removed from disk; the log says why."), prometheus.GaugeValue, func(p Pool) float64 { return float64(p.Stuck) }},
}

func poolDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("hostpath_pool_"+name, help, []string{"pool"}, nil)
}

// Describe implements prometheus.Collector.
func (c *poolCollector) Describe(descs chan<- *prometheus.Desc) {
	descs <- sharedWithOS
	for _, series := range perPool {
		descs <- series.desc
	}
}

// Collect implements prometheus.Collector.
func (c *poolCollector) Collect(metrics chan<- prometheus.Metric) {
	shared := false
	for _, pool := range c.pools() {
		shared = shared || pool.SystemDisk
		for _, series := range perPool {
			metrics <- prometheus.MustNewConstMetric(series.desc, series.kind, series.value(pool), pool.Name)
		}
	}
	metrics <- prometheus.MustNewConstMetric(sharedWithOS, prometheus.GaugeValue, number(shared))
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
