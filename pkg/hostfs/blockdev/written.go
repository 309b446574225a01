package blockdev

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Written are the kernel's counts of what was written to the device or discarded since it appeared (Documentation/block/stat.rst), by itself, by
// its disk, or by what it is mapped to, where that has no other use. It is the same until something is written, and empty where the kernel counts
// nothing (iostats of Documentation/ABI/stable/sysfs-block).
func (f Facts) Written() string {
	dir, err := filepath.EvalSymlinks(filepath.Join(sysfs, f.Number.String()))
	if err != nil {
		return "" // it has gone
	}
	return written(dir)
}

func written(dir string) string {
	disk := dir
	if isPartition(dir) {
		disk = filepath.Dir(dir)
	}
	if attribute(disk, "queue/iostats") != "1" {
		return ""
	}
	found := []string{countsOf(dir).String()}
	if disk != dir {
		found = append(found, besidePartitions(disk).String())
	}
	for _, below := range mappedTo(dir) {
		found = append(found, written(below))
	}
	return strings.Join(found, " ")
}

func isPartition(dir string) bool { return attribute(dir, "partition") != "" }

// passesOn is the uuid of a device of device mapper that writes below it what is written to it and nothing else, as RAID does, and journals.
var passesOn = regexp.MustCompile(`^(mpath-|part[0-9]+-|CRYPT-(LUKS[12]|PLAIN)-)`)

// mappedTo are the devices that one is mapped to. One that has other holders has their writes too, and does not count.
func mappedTo(dir string) (found []string) {
	if !passesOn.MatchString(attribute(dir, "dm/uuid")) {
		return nil
	}
	for _, name := range names(filepath.Join(dir, "slaves")) {
		below, err := filepath.EvalSymlinks(filepath.Join(dir, "slaves", name))
		if err == nil && len(names(filepath.Join(below, "holders"))) == 1 {
			found = append(found, below)
		}
	}
	return found
}

// counts are the requests and sectors of writes, and those of discards.
type counts [4]uint64

// String has pairs of requests and sectors.
func (c counts) String() string { return strings.Trim(fmt.Sprint([4]uint64(c)), "[]") }

// countsOf are those of all devices together.
func countsOf(dirs ...string) (sum counts) {
	for _, dir := range dirs {
		fields := strings.Fields(attribute(dir, "stat"))
		for n, at := range []int{4, 6, 11, 13} {
			if at < len(fields) {
				count, _ := strconv.ParseUint(fields[at], 10, 64) // the kernel writes numbers
				sum[n] += count
			}
		}
	}
	return sum
}

// besidePartitions are the counts of a disk without those of its partitions, which the kernel adds to it (part_stat_add of
// include/linux/part_stat.h): what was written to the disk itself.
func besidePartitions(disk string) (c counts) {
	var parts []string
	for _, name := range names(disk) {
		if part := filepath.Join(disk, name); isPartition(part) {
			parts = append(parts, part)
		}
	}
	const tries = 100 // others of them may be written to between
	sum := countsOf(parts...)
	for range tries {
		c = countsOf(disk)
		before := sum
		if sum = countsOf(parts...); sum == before {
			break
		}
	}
	for n := range c {
		c[n] -= sum[n]
	}
	return c
}
