package main

import (
	"runtime/debug"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/metrics"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
)

// revision is what the program was built from; empty if that was not in a repository.
func revision() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, setting := range info.Settings {
		if setting.Key == "vcs.revision" {
			return setting.Value
		}
	}
	return ""
}

func shownPools(pools []pool.Status) []metrics.Pool {
	var shown []metrics.Pool
	for _, p := range pools {
		shown = append(shown, metrics.Pool{
			Name:           p.Name.String(),
			Serving:        p.Err == nil,
			SystemDisk:     p.SystemDisk,
			Enforced:       p.Enforced,
			Volumes:        p.Volumes,
			Promised:       p.Promised,
			Filesystem:     shownFilesystem(p),
			Available:      p.Available,
			Used:           p.Used,
			Unlimited:      p.Unlimited,
			Untaken:        p.Untaken,
			Trash:          p.Trash,
			Stuck:          p.Stuck,
			TrashBytes:     p.TrashBytes,
			TrashSince:     p.TrashSince,
			Restored:       p.Restored,
			RemovedFiles:   p.RemovedFiles,
			RemovedVolumes: p.RemovedVolumes,
			LastError:      p.LastError,
			Abnormal:       shownReasons(p.Abnormal),
		})
	}
	return shown
}

func shownReasons(abnormal map[health.Reason]int) map[string]int {
	if abnormal == nil {
		return nil
	}
	shown := make(map[string]int, len(abnormal))
	for reason, volumes := range abnormal {
		shown[string(reason)] = volumes
	}
	return shown
}

// eachVolume is nil unless each volume is to be shown.
func eachVolume(c config, pools *pool.Set) func() []metrics.Volume {
	if !c.volumeMetrics {
		return nil
	}
	return func() []metrics.Volume {
		var shown []metrics.Volume
		for _, v := range pools.Surveyed() {
			shown = append(shown, metrics.Volume{
				Pool:     v.Pool.String(),
				Name:     v.ID.String(),
				Capacity: v.Bytes,
				Used:     v.Used,
				Inodes:   v.Inodes,
				Abnormal: v.Condition.Abnormal,
			})
		}
		return shown
	}
}

func shownFilesystem(p pool.Status) *metrics.Filesystem {
	if p.Space == nil {
		return nil
	}
	return &metrics.Filesystem{
		SizeBytes:  p.Space.SizeBytes,
		FreeBytes:  p.Space.FreeBytes,
		Inodes:     p.Space.Inodes,
		FreeInodes: p.Space.InodesFree,
		ReadOnly:   p.Space.ReadOnly,
		Errors:     p.Errors,
	}
}
