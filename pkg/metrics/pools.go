package metrics

import (
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Unknown stands for a number of bytes that is not shown.
const Unknown = -1

// A Pool is what is shown of one.
type Pool struct {
	Name       string
	Serving    bool
	SystemDisk bool // on the filesystem of the operating system
	Enforced   bool // the kernel keeps the sizes of new volumes
	Volumes    int
	Promised   int64 // bytes
	// Filesystem is what the pool lies on; nil while that is not known.
	Filesystem *Filesystem
	Available  int64 // bytes
	Used       int64 // bytes, or Unknown
	// Unlimited is how many volumes only the end of the disk stops, and Untaken what the
	// others may still take of their promises, in bytes; or Unknown.
	Unlimited  int
	Untaken    int64
	Trash      int   // removed volumes that still occupy space
	Stuck      int   // those of them that could not be removed
	TrashBytes int64 // or Unknown
	TrashSince time.Time
	Restored   uint64 // limits that were put back
	// RemovedFiles and RemovedVolumes are what the reaper has done.
	RemovedFiles, RemovedVolumes uint64
	LastError                    time.Time
	// Abnormal is how many volumes are so, by reason; nil while that is not known.
	Abnormal map[string]int
}

// A Filesystem is that of a pool.
type Filesystem struct {
	SizeBytes, FreeBytes int64
	Inodes, FreeInodes   int64 // 0 where inodes are not counted
	ReadOnly             bool
	// Errors is how many it has counted, or Unknown.
	Errors int64
}

// poolCollector makes series of pools when they are asked for.
type poolCollector struct{ pools func() []Pool }

// anyShared is the one metric that users of the earlier driver have alerts on.
var anyShared = prometheus.NewDesc("kubevirt_hpp_pool_path_shared_with_os",
	"1 if a pool that serves shares its filesystem with the operating system, as the earlier driver told it.", nil, nil)

var abnormalVolumes = prometheus.NewDesc("hostpath_pool_abnormal_volumes",
	"Volumes whose condition is abnormal, by the reason that is told of them. Counted once a minute, and absent before that.", []string{"pool", "reason"}, nil)

// perPool are the series with the label "pool" alone.
var perPool = []series[Pool]{
	gauge("serving", "1 if the pool serves.", func(p Pool) (float64, bool) { return number(p.Serving), true }),
	gauge("last_error_timestamp_seconds", "When the pool was last seen not to serve, or its background work failed. Absent if that was never so since the start.", func(p Pool) (float64, bool) { return at(p.LastError) }),
	gauge("shared_with_os", "1 if the pool shares its filesystem with the directory of the socket, which stands for the disk of the operating system. Absent while the pool does not serve.", func(p Pool) (float64, bool) { return number(p.SystemDisk), p.Serving }),
	gauge("quota_enforced", "1 if the kernel keeps the sizes of the pool's new volumes.", func(p Pool) (float64, bool) { return number(p.Enforced), true }),
	gauge("size_bytes", "Size of the pool's filesystem. Absent while the pool does not serve.", onFilesystem(func(f Filesystem) float64 { return float64(f.SizeBytes) })),
	gauge("free_bytes", "What the pool's filesystem has free for users without privileges. Absent while the pool does not serve.", onFilesystem(func(f Filesystem) float64 { return float64(f.FreeBytes) })),
	gauge("available_bytes", "What can still be promised to volumes, by the last look at the pool. GetCapacity looks anew, and in a shared pool counts what other nodes have made since. 0 while the pool does not serve.", func(p Pool) (float64, bool) { return float64(p.Available), true }),
	gauge("promised_bytes", "Bytes set aside for volumes.", func(p Pool) (float64, bool) { return float64(p.Promised), true }),
	gauge("used_bytes", "What the volumes hold, counted once a minute. Absent without quotas, in a shared pool, and where a volume has no limit.", known(func(p Pool) int64 { return p.Used })),
	gauge("unlimited_volumes", "Volumes that nothing but the end of the disk stops: nobody keeps their size, or it cannot be told. Counted about once a minute, in large pools less often, and absent before that and while the pool does not serve.", known(func(p Pool) int64 { return int64(p.Unlimited) })),
	gauge("untaken_bytes", "What the other volumes may still take of what they were promised, which block volumes that are allocated in full may not. Absent like hostpath_pool_unlimited_volumes.", known(func(p Pool) int64 { return p.Untaken })),
	gauge("inodes", "Inodes of the pool's filesystem. Absent where they are not counted, and while the pool does not serve.", inodes(func(f Filesystem) int64 { return f.Inodes })),
	gauge("free_inodes", "Free inodes of the pool's filesystem. Absent like hostpath_pool_inodes.", inodes(func(f Filesystem) int64 { return f.FreeInodes })),
	gauge("read_only", "1 if the pool's filesystem takes no writes. Absent while the pool does not serve.", onFilesystem(func(f Filesystem) float64 { return number(f.ReadOnly) })),
	gauge("filesystem_errors", "Errors that the filesystem has counted, before this start too: of ext4 since its last check, of btrfs since its statistics were reset. Absent on others.", fsErrors),
	gauge("volumes", "Volumes in the pool, lost ones included.", func(p Pool) (float64, bool) { return float64(p.Volumes), true }),
	counter("limits_restored_total", "Limits of volumes that were missing or different, and were put back.", func(p Pool) (float64, bool) { return float64(p.Restored), true }),
	gauge("trash_entries", "Removed volumes, and left-overs of failed creations, that still occupy space.", func(p Pool) (float64, bool) { return float64(p.Trash), true }),
	gauge("trash_stuck_entries", "Removed volumes, and left-overs of failed creations, that could not be erased; the log says why.", func(p Pool) (float64, bool) { return float64(p.Stuck), true }),
	gauge("trash_bytes", "What removed volumes still occupy. Absent where that is not known, as without quotas.", known(func(p Pool) int64 { return p.TrashBytes })),
	gauge("trash_oldest_timestamp_seconds", "When the oldest removed volume that waits to be erased, and is not stuck, was removed, or found at the start of the driver. Absent if there is none.", func(p Pool) (float64, bool) { return at(p.TrashSince) }),
	counter("reaper_removed_files_total", "Files and directories of removed volumes that the reaper took on.", func(p Pool) (float64, bool) { return float64(p.RemovedFiles), true }),
	counter("reaper_removed_volumes_total", "Removed volumes, and left-overs of failed creations, that the reaper has erased.", func(p Pool) (float64, bool) { return float64(p.RemovedVolumes), true }),
}

func poolSeries(kind prometheus.ValueType, name, help string, value func(Pool) (float64, bool)) series[Pool] {
	return series[Pool]{prometheus.NewDesc("hostpath_pool_"+name, help, []string{"pool"}, nil), kind, value}
}

func gauge(name, help string, value func(Pool) (float64, bool)) series[Pool] {
	return poolSeries(prometheus.GaugeValue, name, help, value)
}

func counter(name, help string, value func(Pool) (float64, bool)) series[Pool] {
	return poolSeries(prometheus.CounterValue, name, help, value)
}

func onFilesystem(value func(Filesystem) float64) func(Pool) (float64, bool) {
	return func(p Pool) (float64, bool) {
		if p.Filesystem == nil {
			return 0, false
		}
		return value(*p.Filesystem), true
	}
}

func inodes(value func(Filesystem) int64) func(Pool) (float64, bool) {
	return func(p Pool) (float64, bool) {
		if p.Filesystem == nil || p.Filesystem.Inodes == 0 {
			return 0, false
		}
		return float64(value(*p.Filesystem)), true
	}
}

func fsErrors(p Pool) (float64, bool) {
	if p.Filesystem == nil || p.Filesystem.Errors == Unknown {
		return 0, false
	}
	return float64(p.Filesystem.Errors), true
}

func known(value func(Pool) int64) func(Pool) (float64, bool) {
	return func(p Pool) (float64, bool) { return float64(value(p)), value(p) != Unknown }
}

// at is a time as Prometheus has it, in seconds.
func at(t time.Time) (float64, bool) { return float64(t.UnixMilli()) / 1000, !t.IsZero() }

// Describe implements prometheus.Collector.
func (c *poolCollector) Describe(descs chan<- *prometheus.Desc) {
	descs <- anyShared
	descs <- abnormalVolumes
	for _, s := range perPool {
		descs <- s.desc
	}
}

// Collect implements prometheus.Collector.
func (c *poolCollector) Collect(metrics chan<- prometheus.Metric) {
	shared := false
	for _, pool := range c.pools() {
		shared = shared || pool.SystemDisk
		for _, s := range perPool {
			s.collect(metrics, pool, pool.Name)
		}
		for _, reason := range slices.Sorted(maps.Keys(pool.Abnormal)) {
			metrics <- prometheus.MustNewConstMetric(abnormalVolumes, prometheus.GaugeValue, float64(pool.Abnormal[reason]), pool.Name, reason)
		}
	}
	metrics <- prometheus.MustNewConstMetric(anyShared, prometheus.GaugeValue, number(shared))
}
