package blockdev

import (
	"path/filepath"
	"strings"
)

// Written are the kernel's counts of what was written to the device or discarded since it appeared (Documentation/block/stat.rst). It is the
// same until something is written, and empty where the kernel keeps none.
func (f Facts) Written() string {
	counts := strings.Fields(attribute(filepath.Join(sysfs, f.Number.String()), "stat"))
	var found []string
	for _, at := range []int{4, 6, 11, 13} { // write and discard, requests and sectors
		if at < len(counts) {
			found = append(found, counts[at])
		}
	}
	return strings.Join(found, " ")
}
