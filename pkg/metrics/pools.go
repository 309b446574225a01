package metrics

import (
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

type poolCollector struct{ pools func() []pool.Status }

// anyShared is the one metric that users of the upstream KubeVirt driver have alerts on.
var anyShared = prometheus.NewDesc("kubevirt_hpp_pool_path_shared_with_os",
	"1 if a serving pool shares its filesystem with the operating system, as the upstream KubeVirt driver reports it.", nil, nil)

var abnormalVolumes = prometheus.NewDesc("hostpath_pool_abnormal_volumes",
	"Volumes whose condition is abnormal, by reason. Counted once a minute, and absent before that.", []string{"pool", "reason"}, nil)

var sharesFilesystem = prometheus.NewDesc("hostpath_pool_shares_filesystem",
	"1 for each other pool of the node on the pool's filesystem.", []string{"pool", "with"}, nil)

var snapshots = prometheus.NewDesc("hostpath_pool_snapshots",
	"Snapshots whose record can be read, by what they promise of their content.", []string{"pool", "consistency"}, nil)

var copyDuration = prometheus.NewDesc("hostpath_pool_copy_duration_seconds",
	"Duration of making snapshots, restores and clones, without those that failed, by how their content was copied.", []string{"pool", "method"}, nil)

var copyStall = prometheus.NewDesc("hostpath_pool_copy_stall_seconds",
	"Longest wait of a writer to the source of these copies: while the blocks of a file were shared, or its pod was frozen.", []string{"pool", "method"}, nil)

var failedCopies = prometheus.NewDesc("hostpath_pool_failed_copies_total",
	"Snapshots, restores and clones that failed after copying began, by how their content was to be copied.", []string{"pool", "method"}, nil)

// A filesystemSum is over all pools of the node on one filesystem.
type filesystemSum struct{ promised, unlimited, unused int64 }

// perFilesystem are the series of pools about all pools on their filesystem together.
var perFilesystem = []series[filesystemSum]{
	filesystemGauge("promised_bytes", "Space promised to volumes and snapshots of all pools of the node on the pool's filesystem.", func(s filesystemSum) int64 { return s.promised }),
	filesystemGauge("unlimited_volumes", "The sum of hostpath_pool_unlimited_volumes over all pools of the node on the pool's filesystem. Absent where one of them is.", func(s filesystemSum) int64 { return s.unlimited }),
	filesystemGauge("promised_unused_bytes", "The sum of hostpath_pool_promised_unused_bytes over all pools of the node on the pool's filesystem. Absent where one of them is.", func(s filesystemSum) int64 { return s.unused }),
}

func filesystemGauge(name, help string, value func(filesystemSum) int64) series[filesystemSum] {
	return series[filesystemSum]{
		prometheus.NewDesc("hostpath_pool_filesystem_"+name, help, []string{"pool"}, nil), prometheus.GaugeValue,
		func(s filesystemSum) (float64, bool) { return float64(value(s)), value(s) != volume.Unknown },
	}
}

func sumOf(p pool.Status, all []pool.Status) filesystemSum {
	sum := filesystemSum{p.Promised, int64(p.Counted.Unlimited), p.Counted.Unused}
	add := func(to *int64, of int64) {
		if *to == volume.Unknown || of == volume.Unknown {
			*to = volume.Unknown
		} else {
			*to += of
		}
	}
	for _, other := range all {
		if slices.Contains(p.SharesWith, other.Name) {
			add(&sum.promised, other.Promised)
			add(&sum.unlimited, int64(other.Counted.Unlimited))
			add(&sum.unused, other.Counted.Unused)
		}
	}
	return sum
}

// perPool are the series with only the label "pool".
var perPool = []series[pool.Status]{
	gauge("serving", "1 if the pool serves.", func(p pool.Status) (float64, bool) { return number(p.Err == nil), true }),
	gauge("last_error_timestamp_seconds", "Time at which a health check or background work of the pool last failed. Absent if none has since the driver started.", func(p pool.Status) (float64, bool) { return at(p.LastError) }),
	gauge("shared_with_os", "1 if the pool shares its filesystem with the operating system, which is taken to be that of the directory of the socket. Absent while the pool does not serve.", func(p pool.Status) (float64, bool) { return number(p.SystemDisk), p.Err == nil }),
	gauge("quota_enforced", "1 if the kernel enforces the sizes of new volumes.", func(p pool.Status) (float64, bool) { return number(p.Enforced), true }),
	gauge("size_bytes", "Size of the pool's filesystem. Absent while the pool does not serve.", onFilesystem(func(f dir.Space) float64 { return float64(f.SizeBytes) })),
	gauge("free_bytes", "Free space of the pool's filesystem for unprivileged users. Absent while the pool does not serve.", onFilesystem(func(f dir.Space) float64 { return float64(f.FreeBytes) })),
	gauge("available_bytes", "Space that new volumes can be promised, as of the last health check. 0 while the pool does not serve.", func(p pool.Status) (float64, bool) { return float64(p.Available), true }),
	gauge("promised_bytes", "Space promised to volumes and snapshots.", func(p pool.Status) (float64, bool) { return float64(p.Promised), true }),
	gauge("used_bytes", "Space that volumes use of their promises, counted once a minute. Absent without quotas, in a shared pool, and where a volume has no limit.", known(func(p pool.Status) int64 { return p.Counted.Used })),
	gauge("unlimited_volumes", "Volumes that can fill the filesystem, because their size is not enforced or not known. Counted about once a minute. Absent before that and while the pool does not serve.", known(func(p pool.Status) int64 { return int64(p.Counted.Unlimited) })),
	gauge("promised_unused_bytes", "Space promised to the other volumes that they have not used yet. Fully allocated block volumes have none. Absent like hostpath_pool_unlimited_volumes.", known(func(p pool.Status) int64 { return p.Counted.Unused })),
	gauge("inodes", "Inodes of the pool's filesystem. Absent where they are not counted, and while the pool does not serve.", inodes(func(f dir.Space) int64 { return f.Inodes })),
	gauge("free_inodes", "Free inodes of the pool's filesystem. Absent like hostpath_pool_inodes.", inodes(func(f dir.Space) int64 { return f.InodesFree })),
	gauge("read_only", "1 if the pool's filesystem is read-only. Absent while the pool does not serve.", onFilesystem(func(f dir.Space) float64 { return number(f.ReadOnly) })),
	gauge("filesystem_errors", "Errors that the filesystem has counted: ext4 since its last check, btrfs since its statistics were reset. Absent on others.", fsErrors),
	gauge("volumes", "Volumes in the pool, including lost ones.", func(p pool.Status) (float64, bool) { return float64(p.Volumes), true }),
	gauge("snapshot_promised_bytes", "The part of hostpath_pool_promised_bytes that is promised to snapshots.", func(p pool.Status) (float64, bool) { return float64(p.Snapshots.Promised), true }),
	gauge("lost_snapshots", "Snapshots that are damaged and cannot be restored. Counted once a minute.", func(p pool.Status) (float64, bool) { return float64(p.Snapshots.Lost), true }),
	gauge("upstream_snapshots", "Snapshots of the upstream KubeVirt driver in a snapshotPath within the pool. Counted once a minute; absent without one, and while it cannot be read.", known(func(p pool.Status) int64 { return int64(p.Counted.Upstream) })),
	gauge("copies_in_progress", "Snapshots, restores and clones that are being made.", func(p pool.Status) (float64, bool) { return float64(p.Copies.Running), true }),
	counter("limits_restored_total", "Limits of volumes that were missing or wrong and were restored.", func(p pool.Status) (float64, bool) { return float64(p.Restored), true }),
	gauge("trash_entries", "Deleted volumes and remains of failed creations that still use space.", func(p pool.Status) (float64, bool) { return float64(p.Trash.Pieces), true }),
	gauge("trash_stuck_entries", "Deleted volumes and remains of failed creations that could not be removed. The log has the reason.", func(p pool.Status) (float64, bool) { return float64(p.Trash.Stuck), true }),
	gauge("trash_bytes", "Space that deleted volumes still use. Absent if unknown, such as without quotas.", known(func(p pool.Status) int64 { return p.Trash.Bytes })),
	gauge("trash_oldest_timestamp_seconds", "Time at which the oldest volume in the trash that is not stuck was deleted, or found when the driver started. Absent if there is none.", func(p pool.Status) (float64, bool) { return at(p.Trash.Since) }),
	counter("reaper_removed_files_total", "Files and directories of deleted volumes that the reaper has processed.", func(p pool.Status) (float64, bool) { return float64(p.Erased.Files), true }),
	counter("reaper_removed_volumes_total", "Deleted volumes and remains of failed creations that the reaper has removed.", func(p pool.Status) (float64, bool) { return float64(p.Erased.Volumes), true }),
}

func poolSeries(kind prometheus.ValueType, name, help string, value func(pool.Status) (float64, bool)) series[pool.Status] {
	return series[pool.Status]{prometheus.NewDesc("hostpath_pool_"+name, help, []string{"pool"}, nil), kind, value}
}

func gauge(name, help string, value func(pool.Status) (float64, bool)) series[pool.Status] {
	return poolSeries(prometheus.GaugeValue, name, help, value)
}

func counter(name, help string, value func(pool.Status) (float64, bool)) series[pool.Status] {
	return poolSeries(prometheus.CounterValue, name, help, value)
}

func onFilesystem(value func(dir.Space) float64) func(pool.Status) (float64, bool) {
	return func(p pool.Status) (float64, bool) {
		if p.Space == nil {
			return 0, false
		}
		return value(*p.Space), true
	}
}

func inodes(value func(dir.Space) int64) func(pool.Status) (float64, bool) {
	return func(p pool.Status) (float64, bool) {
		if p.Space == nil || p.Space.Inodes == 0 {
			return 0, false
		}
		return float64(value(*p.Space)), true
	}
}

func fsErrors(p pool.Status) (float64, bool) {
	if p.Space == nil || p.Errors == volume.Unknown {
		return 0, false
	}
	return float64(p.Errors), true
}

func known(value func(pool.Status) int64) func(pool.Status) (float64, bool) {
	return func(p pool.Status) (float64, bool) { return float64(value(p)), value(p) != volume.Unknown }
}

// at is a time as Prometheus has it, in seconds.
func at(t time.Time) (float64, bool) { return float64(t.UnixMilli()) / 1000, !t.IsZero() }

// Describe implements prometheus.Collector.
func (c *poolCollector) Describe(descs chan<- *prometheus.Desc) {
	descs <- anyShared
	descs <- abnormalVolumes
	descs <- sharesFilesystem
	descs <- snapshots
	descs <- copyDuration
	descs <- copyStall
	descs <- failedCopies
	for _, s := range perPool {
		descs <- s.desc
	}
	for _, s := range perFilesystem {
		descs <- s.desc
	}
}

// Collect implements prometheus.Collector.
func (c *poolCollector) Collect(metrics chan<- prometheus.Metric) {
	shared, pools := false, c.pools()
	for _, p := range pools {
		shared = shared || p.SystemDisk
		for _, s := range perPool {
			s.collect(metrics, p, p.Name.String())
		}
		for _, s := range perFilesystem {
			s.collect(metrics, sumOf(p, pools), p.Name.String())
		}
		for _, other := range p.SharesWith {
			metrics <- prometheus.MustNewConstMetric(sharesFilesystem, prometheus.GaugeValue, 1, p.Name.String(), other.String())
		}
		collectSnapshots(metrics, p)
		for _, reason := range slices.Sorted(maps.Keys(p.Abnormal)) {
			metrics <- prometheus.MustNewConstMetric(abnormalVolumes, prometheus.GaugeValue, float64(p.Abnormal[reason]), p.Name.String(), string(reason))
		}
	}
	metrics <- prometheus.MustNewConstMetric(anyShared, prometheus.GaugeValue, number(shared))
}

func collectSnapshots(metrics chan<- prometheus.Metric, p pool.Status) {
	name := p.Name.String()
	for consistency, count := range map[volume.Consistency]int{
		volume.PointInTime: p.Snapshots.PointInTime, volume.CrashConsistent: p.Snapshots.CrashConsistent, volume.Unverified: p.Snapshots.Unverified,
	} {
		metrics <- prometheus.MustNewConstMetric(snapshots, prometheus.GaugeValue, float64(count), name, string(consistency))
	}
	// Also of a method that was not used yet: a rate begins with the first copy only if there was a zero before.
	for _, method := range []volume.CopyMethod{volume.ByReference, volume.BySubvolume, volume.ByCopy} {
		sum := p.Copies.Done[method]
		metrics <- prometheus.MustNewConstSummary(copyDuration, sum.Count, sum.Took.Seconds(), nil, name, string(method))
		metrics <- prometheus.MustNewConstSummary(copyStall, sum.Count, sum.Stalled.Seconds(), nil, name, string(method))
		metrics <- prometheus.MustNewConstMetric(failedCopies, prometheus.CounterValue, float64(sum.Failed), name, string(method))
	}
}
