package metrics

import "github.com/prometheus/client_golang/prometheus"

// A Volume is what is shown of one.
type Volume struct {
	Pool, Name string
	Capacity   int64 // bytes
	Used       int64 // bytes, or Unknown
	Inodes     int64 // in use, or Unknown
	Abnormal   bool
}

// volumeCollector makes series of volumes when they are asked for.
type volumeCollector struct{ volumes func() []Volume }

// perVolume are the series with the labels "pool" and "volume".
var perVolume = []series[Volume]{
	volumeSeries("capacity_bytes", "Size of the volume; of one without a promise that of its pool.", func(v Volume) (float64, bool) { return float64(v.Capacity), true }),
	volumeSeries("used_bytes", "What the volume holds. Absent where no quota counts it.", func(v Volume) (float64, bool) { return float64(v.Used), v.Used != Unknown }),
	volumeSeries("inodes_used", "Files and directories of the volume. Absent where no quota counts them.", func(v Volume) (float64, bool) { return float64(v.Inodes), v.Inodes != Unknown }),
	volumeSeries("abnormal", "1 if the condition of the volume is abnormal.", func(v Volume) (float64, bool) { return number(v.Abnormal), true }),
}

func volumeSeries(name, help string, value func(Volume) (float64, bool)) series[Volume] {
	return series[Volume]{prometheus.NewDesc("hostpath_volume_"+name, help, []string{"pool", "volume"}, nil), prometheus.GaugeValue, value}
}

// Describe implements prometheus.Collector.
func (c *volumeCollector) Describe(descs chan<- *prometheus.Desc) {
	for _, s := range perVolume {
		descs <- s.desc
	}
}

// Collect implements prometheus.Collector.
func (c *volumeCollector) Collect(metrics chan<- prometheus.Metric) {
	for _, volume := range c.volumes() {
		for _, s := range perVolume {
			s.collect(metrics, volume, volume.Pool, volume.Name)
		}
	}
}
