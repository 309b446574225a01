package localpv

import "github.com/prometheus/client_golang/prometheus"

// metrics are those of a node, which all have its name as a label.
type metrics struct {
	available, errors, config, missing, wiping, uncleaned prometheus.Gauge
	progress                                              *prometheus.GaugeVec
	wiped                                                 prometheus.Counter
	writes                                                *prometheus.CounterVec
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
		errors:    gauge("error_devices", "Devices that cannot be offered or cleaned, and PersistentVolumes whose device is missing or another one. Events say why."),
		config:    gauge("config_error", "1 while the ConfigMap of the node cannot be used or differs from that of its PersistentVolumes."),
		missing:   gauge("missing_devices", "PersistentVolumes whose device is not there."),
		uncleaned: gauge("uncleaned_volumes", "Released PersistentVolumes whose device is neither clean nor being cleaned."),
		wiping:    gauge("wiping_devices", "Devices that are being checked or cleaned."),
		progress: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "local_pv_provisioner_wipe_progress_ratio",
			Help: "How much of a device is cleaned, from 0 to 1.", ConstLabels: labels}, []string{"device"}),
		wiped: prometheus.NewCounter(prometheus.CounterOpts{Name: "local_pv_provisioner_wiped_bytes_total",
			Help: "Bytes of devices that were overwritten or discarded.", ConstLabels: labels}),
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "local_pv_provisioner_api_writes_total",
			Help: "Changes of PersistentVolumes that were asked of the API server.", ConstLabels: labels}, []string{"verb"}),
	}
	registry.MustRegister(m.progress, m.wiped, m.writes)
	return m
}
