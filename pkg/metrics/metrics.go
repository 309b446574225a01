// Package metrics exports the driver's state to Prometheus: duration and result of
// calls, and the state of the pools. It imports neither gRPC nor the pools.
package metrics

import (
	"regexp"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
)

// Options say what is exported. The functions are called at each scrape, and must answer
// from memory.
type Options struct {
	// Version is that of the driver, and Revision what it was built from; empty if that
	// is not known.
	Version, Revision string
	Pools             func() []pool.Status
	// Volumes are shown one by one; nil for none.
	Volumes func() []pool.Surveyed
	// DroppedSpans is how many no collector took; nil if nothing is traced.
	DroppedSpans func() uint64
	// More is what a program has besides.
	More []prometheus.Collector
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

// New makes the metrics of a driver.
func New(o Options) *Metrics {
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
	abandoned := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "hostpath_abandoned_calls",
		Help: "CSI calls, checks and system calls that exceeded their time limit and have not returned. More than 0 for minutes: a filesystem or a device hangs.",
	}, func() float64 { return float64(hang.Abandoned()) })
	m.registry.MustRegister(m.calls, m.panics, abandoned, buildInfo(o), &poolCollector{pools: o.Pools},
		goCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.registry.MustRegister(o.More...)
	if o.Volumes != nil {
		m.registry.MustRegister(&volumeCollector{volumes: o.Volumes})
	}
	if o.DroppedSpans != nil {
		m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "hostpath_tracing_dropped_spans_total",
			Help: "Spans that were dropped because the queue was full or an export failed. Absent without a collector.",
		}, func() float64 { return float64(o.DroppedSpans()) }))
	}
	return m
}

// goCollector adds what the last collection left in the heap to the usual series. What is in
// use at some moment, and when the next collection comes, say little of what grows.
func goCollector() prometheus.Collector {
	live := collectors.GoRuntimeMetricsRule{Matcher: regexp.MustCompile(`^/gc/heap/live:bytes$`)}
	return collectors.NewGoCollector(collectors.WithGoCollectorRuntimeMetrics(live))
}

func buildInfo(o Options) prometheus.Collector {
	labels := prometheus.Labels{"version": o.Version, "goversion": runtime.Version()}
	if o.Revision != "" {
		labels["revision"] = o.Revision
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "hostpath_build_info",
		Help:        "Always 1. The labels have the version that the driver reports, that of Go, and the revision of the source if it is known.",
		ConstLabels: labels,
	})
	build.Set(1)
	return build
}

// Call records one answered call.
func (m *Metrics) Call(method, code string, duration time.Duration) {
	m.calls.WithLabelValues(method, code).Observe(duration.Seconds())
}

// Panic records a handler that panicked.
func (m *Metrics) Panic(method string) { m.panics.WithLabelValues(method).Inc() }

// Gatherer has what a scrape shows.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// A series is one metric of the things that a collector shows.
type series[T any] struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	// value returns false where there is none.
	value func(T) (float64, bool)
}

func (s series[T]) collect(metrics chan<- prometheus.Metric, of T, labels ...string) {
	if value, ok := s.value(of); ok {
		metrics <- prometheus.MustNewConstMetric(s.desc, s.kind, value, labels...)
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
