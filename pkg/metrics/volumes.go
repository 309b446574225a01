package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

type volumeCollector struct{ volumes func() []pool.Surveyed }

// perVolume are the series with the labels "pool" and "volume".
var perVolume = []series[pool.Surveyed]{
	volumeSeries("capacity_bytes", "Size of the volume; of one without a promise that of its pool.", func(v pool.Surveyed) (float64, bool) { return float64(v.Bytes), true }),
	volumeSeries("used_bytes", "What the volume holds. Absent where no quota counts it.", func(v pool.Surveyed) (float64, bool) { return float64(v.Used), v.Used != volume.Unknown }),
	volumeSeries("inodes_used", "Files and directories of the volume. Absent where no quota counts them.", func(v pool.Surveyed) (float64, bool) { return float64(v.Inodes), v.Inodes != volume.Unknown }),
	volumeSeries("abnormal", "1 if the condition of the volume is abnormal.", func(v pool.Surveyed) (float64, bool) { return number(v.Condition.Abnormal), true }),
}

func volumeSeries(name, help string, value func(pool.Surveyed) (float64, bool)) series[pool.Surveyed] {
	return series[pool.Surveyed]{prometheus.NewDesc("hostpath_volume_"+name, help, []string{"pool", "volume"}, nil), prometheus.GaugeValue, value}
}

// Describe implements prometheus.Collector.
func (c *volumeCollector) Describe(descs chan<- *prometheus.Desc) {
	for _, s := range perVolume {
		descs <- s.desc
	}
}

// Collect implements prometheus.Collector.
func (c *volumeCollector) Collect(metrics chan<- prometheus.Metric) {
	for _, v := range c.volumes() {
		for _, s := range perVolume {
			s.collect(metrics, v, v.Pool.String(), v.ID.String())
		}
	}
}
