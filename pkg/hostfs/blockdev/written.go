package blockdev

import (
	"path/filepath"
	"strings"
)

// Written are the kernel's counts of what was written to the device or discarded since it appeared (Documentation/block/stat.rst). It is the
// same until something is written, and empty where the kernel counts nothing (iostats of Documentation/ABI/stable/sysfs-block).
func (f Facts) Written() string {
	if attribute(filepath.Join(sysfs, f.Disk.String()), "queue/iostats") != "1" {
		return ""
	}
	counts := strings.Fields(attribute(filepath.Join(sysfs, f.Number.String()), "stat"))
	var found []string
	for _, at := range []int{4, 6, 11, 13} { // write and discard, requests and sectors
		if at < len(counts) {
			found = append(found, counts[at])
		}
	}
	return strings.Join(found, " ")
}
