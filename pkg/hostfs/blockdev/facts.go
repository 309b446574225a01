package blockdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// sysfs has a directory for each block device.
const sysfs = "/sys/dev/block"

// Facts are what the kernel knows of a device, without opening it.
type Facts struct {
	Number Number
	// Name is the kernel's, such as sda1.
	Name      string
	SizeBytes int64
	ReadOnly  bool
	// Holders are the kernel's names of devices that this one is part of: device mapper, md, bcache.
	Holders []string
	// Loops are loop devices that have this one, its disk or one of its partitions as their file.
	Loops []string
	// Disk is the disk that a partition is on, and for what is no partition the device itself.
	Disk Number
	// Partitions are those of a disk.
	Partitions []Number
	// Identity is what distinguishes the hardware, or the file of a loop device, and stays when numbers and paths
	// change. It is empty if the kernel does not know any.
	Identity string
}

// IsPartition says whether the device is a part of a disk.
func (f Facts) IsPartition() bool { return f.Disk != f.Number }

// Inspect reads the facts of a device. It returns ErrGone if there is none.
func Inspect(n Number) (Facts, error) {
	dir, err := filepath.EvalSymlinks(filepath.Join(sysfs, n.String()))
	if errors.Is(err, fs.ErrNotExist) {
		return Facts{}, fmt.Errorf("device %s: %w", n, ErrGone)
	}
	if err != nil {
		return Facts{}, err
	}
	f := Facts{Number: n, Name: strings.ReplaceAll(filepath.Base(dir), "!", "/"), Disk: n}
	sectors, err := strconv.ParseInt(attribute(dir, "size"), 10, 64)
	if err != nil {
		return f, fmt.Errorf("device %s: %w (its size is %q)", n, ErrGone, attribute(dir, "size"))
	}
	f.SizeBytes = sectors * sector
	f.ReadOnly = attribute(dir, "ro") != "0"
	f.Holders = names(filepath.Join(dir, "holders"))
	if attribute(dir, "partition") != "" {
		if f.Disk, err = parseNumber(attribute(filepath.Dir(dir), "dev")); err != nil {
			return f, fmt.Errorf("disk of %s: %w", f.Name, err)
		}
	}
	if f.Partitions, err = partitions(dir); err != nil {
		return f, err
	}
	f.Identity = identity(dir)
	f.Loops = loopsOn(append(f.Overlapping(), n))
	return f, nil
}

// Overlapping are the other devices that have blocks of this one: its disk, or its partitions.
func (f Facts) Overlapping() []Number {
	if f.IsPartition() {
		return []Number{f.Disk}
	}
	return slices.Clone(f.Partitions)
}

// Twins are the kernel's names of other devices of the same identity and size: other paths to the same disk, which the
// kernel does not know to be one. Those that multipathd or the NVMe driver has put together are not among them: they have no
// number, or are held.
func (f Facts) Twins() (found []string) {
	if f.Identity == "" {
		return nil
	}
	size := strconv.FormatInt(f.SizeBytes/sector, 10)
	for _, name := range names(sysfs) {
		dir, err := filepath.EvalSymlinks(filepath.Join(sysfs, name))
		if err != nil || name == f.Number.String() || attribute(dir, "size") != size {
			continue // it has just gone, or is another one
		}
		if identity(dir) == f.Identity {
			found = append(found, strings.ReplaceAll(filepath.Base(dir), "!", "/"))
		}
	}
	return found
}

func attribute(dir, name string) string {
	content, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return "" // it has none
	}
	return strings.TrimSpace(string(content))
}

func names(dir string) (found []string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		found = append(found, e.Name())
	}
	return found
}

func parseNumber(s string) (Number, error) {
	major, minor, _ := strings.Cut(s, ":")
	a, err := strconv.ParseUint(major, 10, 32)
	if err != nil {
		return Number{}, err
	}
	b, err := strconv.ParseUint(minor, 10, 32)
	return Number{uint32(a), uint32(b)}, err
}

func partitions(dir string) (found []Number, err error) {
	for _, name := range names(dir) {
		below := filepath.Join(dir, name)
		if attribute(below, "partition") == "" {
			continue
		}
		n, err := parseNumber(attribute(below, "dev"))
		if err != nil {
			return nil, fmt.Errorf("partition %s: %w", name, err)
		}
		found = append(found, n)
	}
	return found, nil
}

// identities are attributes by which a disk is known, the best first.
var identities = []string{"wwid", "device/wwid", "uuid", "serial", "device/serial", "dm/uuid", "md/uuid", "loop/backing_file"}

func identity(dir string) string {
	disk, part := dir, ""
	if number := attribute(dir, "partition"); number != "" {
		disk, part = filepath.Dir(dir), "#"+number
	}
	for _, name := range identities {
		if value := attribute(disk, name); value != "" {
			if offset := attribute(disk, "loop/offset"); offset != "" && offset != "0" {
				part = "@" + offset + part // another part of the file
			}
			return filepath.Base(name) + "=" + value + part
		}
	}
	return ""
}

// loopsOn finds loop devices whose file is one of the devices. No other file is asked for: it may be on a filesystem that hangs. Those that
// kubelet attaches have a mount of the node as their file, which Mounts finds.
func loopsOn(devices []Number) (found []string) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil
	}
	for _, file := range files {
		backing := attribute(filepath.Dir(file), "backing_file")
		if !strings.HasPrefix(backing, "/dev/") {
			continue
		}
		if at, err := At(backing); err == nil && slices.Contains(devices, at) {
			found = append(found, filepath.Base(filepath.Dir(filepath.Dir(file))))
		}
	}
	return found
}

// Swap reports whether the kernel swaps to the device (proc(5), /proc/swaps).
func (f Facts) Swap() (bool, error) {
	content, err := os.ReadFile("/proc/swaps")
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // a kernel without swap
	}
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(content)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[1] == "partition" && f.named(fields[0]) {
			return true, nil
		}
	}
	return false, nil
}

// named reports whether a path of some mount namespace is this device's.
func (f Facts) named(path string) bool {
	if !strings.HasPrefix(path, "/dev/") {
		return false
	}
	if at, err := At(path); err == nil {
		return at == f.Number
	}
	return filepath.Base(path) == filepath.Base(f.Name)
}

// nodeMounted says whether a mount of a type, from a root in its filesystem to a place, is one of the device's node.
func (f Facts) nodeMounted(kind, root, place string) bool {
	return kind == "devtmpfs" && root == "/"+f.Name && !strings.HasPrefix(place, "/dev/")
}

// Mounts are the places where the device is mounted, or its node, as kubelet maps a block volume for a pod, in the mount
// namespace of any process that /proc shows, each with the process.
func (f Facts) Mounts() ([]string, error) {
	tables, err := filepath.Glob("/proc/[0-9]*/mountinfo")
	if err != nil {
		return nil, err
	}
	var found []string
	seen := make(map[string]bool)
	for _, table := range tables {
		content, err := os.ReadFile(table)
		if err != nil {
			continue // the process has ended, or has no mounts any more
		}
		// Most processes share the host's.
		if seen[string(content)] {
			continue
		}
		seen[string(content)] = true
		process := strings.Split(table, "/")[2]
		for _, place := range f.mountsIn(content) {
			if !slices.ContainsFunc(found, func(s string) bool { return strings.HasPrefix(s, place+" ") }) {
				found = append(found, fmt.Sprintf("%s (process %s)", place, process))
			}
		}
	}
	return found, nil
}

// mountsIn are the mount points of the device in a mount table (proc_pid_mountinfo(5)).
func (f Facts) mountsIn(table []byte) (found []string) {
	for line := range strings.Lines(string(table)) {
		before, after, ok := strings.Cut(line, " - ")
		fields, last := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 5 || len(last) < 2 {
			continue
		}
		// Btrfs has numbers of its own.
		if fields[2] == f.Number.String() || strings.HasPrefix(last[1], "/dev/") && filepath.Base(last[1]) == filepath.Base(f.Name) ||
			f.nodeMounted(last[0], fields[3], fields[4]) {
			found = append(found, fields[4])
		}
	}
	return found
}
