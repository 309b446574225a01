package localpv

import "github.com/prometheus/client_golang/prometheus"

// metrics are those of a node, which all have its name as a label.
type metrics struct {
	available, errors, used, missing, wiping, uncleaned prometheus.Gauge
	config, progress                                    *prometheus.GaugeVec
	wiped                                               prometheus.Counter
	writes                                              *prometheus.CounterVec
}

func newMetrics(registry prometheus.Registerer, node string) *metrics {
	labels := prometheus.Labels{"node": node}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "local_pv_provisioner_" + name, Help: help, ConstLabels: labels})
		registry.MustRegister(g)
		return g
	}
	m := &metrics{
		available: gauge("available_devices", "Devices that are PersistentVolumes, in use or not."),
		errors:    gauge("error_devices", "Devices that cannot be offered or cleaned, and PersistentVolumes whose device is missing or was replaced by another. Events give the reason."),
		used:      gauge("used_devices", "Devices that the configuration selects, and that the node has for itself, as partitions, mounted or open devices, parts of others, or that are new."),
		missing:   gauge("missing_devices", "PersistentVolumes whose device is not there."),
		uncleaned: gauge("uncleaned_volumes", "Released PersistentVolumes whose device is neither clean nor being cleaned."),
		wiping:    gauge("wiping_devices", "Devices that are being checked or cleaned."),
		config: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "local_pv_provisioner_config_error",
			Help:        "1 while the ConfigMap of the node cannot be used (invalid) or differs from that of its PersistentVolumes (conflict).",
			ConstLabels: labels}, []string{"reason"}),
		progress: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "local_pv_provisioner_wipe_progress_ratio",
			Help: "How much of a device is cleaned, from 0 to 1.", ConstLabels: labels}, []string{"device"}),
		wiped: prometheus.NewCounter(prometheus.CounterOpts{Name: "local_pv_provisioner_wiped_bytes_total",
			Help: "Bytes of devices that were overwritten or discarded.", ConstLabels: labels}),
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "local_pv_provisioner_api_writes_total",
			Help: "Requests to the API server that change PersistentVolumes and Leases.", ConstLabels: labels}, []string{"verb"}),
	}
	registry.MustRegister(m.config, m.progress, m.wiped, m.writes)
	return m
}

// Reasons of a configuration without effect.
const (
	invalid  = "invalid"
	conflict = "conflict"
)

func (m *metrics) configIs(reason string) {
	for _, r := range []string{invalid, conflict} {
		value := 0.0
		if r == reason {
			value = 1
		}
		m.config.WithLabelValues(r).Set(value)
	}
}
