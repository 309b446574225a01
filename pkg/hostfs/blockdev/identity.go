package blockdev

import "strings"

// DiskAndPart takes an identity apart, into what several paths to one disk have alike, and the number of a partition. That of a
// multipath device is that of its paths: the digit before the number of the disk is the kind of that (SPC-4, 7.8.6), which the kernel
// writes as a word. Spaces of vendors are written as one underscore there.
func DiskAndPart(identity string) (disk, part string) {
	_, disk, _ = strings.Cut(identity, "=")
	disk, part, _ = strings.Cut(disk, "#")
	if partition, whole, ok := strings.Cut(disk, "-mpath-"); ok && strings.HasPrefix(partition, "part") {
		disk, part = "mpath-"+whole, strings.TrimPrefix(partition, "part")
	}
	id, multipath := strings.CutPrefix(disk, "mpath-")
	switch {
	case multipath && strings.HasPrefix(id, "3"):
		return "naa." + id[1:], part
	case multipath && strings.HasPrefix(id, "2"):
		return "eui." + id[1:], part
	case multipath && strings.HasPrefix(id, "1"):
		return "t10." + id[1:], part
	}
	if strings.HasPrefix(id, "t10.") {
		id = strings.Join(strings.Fields(id), "_")
	}
	return id, part
}
