package blockdev

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
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
	// Holders are devices that this one is part of, by the kernel's names and by those of device mapper: device mapper, md,
	// bcache.
	Holders []string
	// Snapshots are devices that LVM keeps what was on this one for, by the same names: what is overwritten here is copied to them first, and
	// one that is full is lost.
	Snapshots []string
	// Disk is the disk that a partition is on, and for what is no partition the device itself.
	Disk Number
	// Partition is the number of a partition on its disk, from 1.
	Partition int
	// Start is where the kernel has a partition begin on its disk, in bytes, and 0 where it says nothing of that. Numbers of partitions
	// change when they are sorted or made anew.
	Start int64
	// Partitions are those of a disk.
	Partitions []Number
	// Below are the devices that one of device mapper or md is made of, whatever is between.
	Below []Number
	// Commands are character devices by which commands reach a disk: /dev/sg0 and /dev/bsg/0:0:0:0 of SCSI, /dev/ng0n1 and
	// the controllers of NVMe.
	Commands []Number
	// Identity is what distinguishes the hardware, and stays when numbers and paths change. It is empty if the kernel does not know any.
	Identity string
	// Alike is the same, or, for a device without an identity, what it has in common with others that may be it: enough to leave it alone,
	// and not to know it by.
	Alike string
}

// Instance is that of the device: see Device.Instance.
func (f Facts) Instance() (string, error) { return Device{f.Name, f.Number}.Instance() }

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
	f.Holders, f.Snapshots = holders(dir), snapshots(dir)
	if f.Disk, f.Partition, err = partOf(dir, n); err != nil {
		return f, fmt.Errorf("disk of %s: %w", f.Name, err)
	}
	f.Start = start(dir)
	if f.Partitions, err = partitions(dir); err != nil {
		return f, err
	}
	f.Below, f.Commands = below(dir), commands(dir)
	f.Alike = likeness(dir)
	if isIdentity(dir, f.Alike) {
		f.Identity = f.Alike
	}
	return f, nil
}

func below(dir string) (found []Number) {
	for _, name := range names(filepath.Join(dir, "slaves")) {
		at, err := filepath.EvalSymlinks(filepath.Join(dir, "slaves", name))
		if err != nil {
			continue // it has just gone
		}
		if n, err := parseNumber(attribute(at, "dev")); err == nil {
			found = append(append(found, n), below(at)...)
		}
	}
	return found
}

// commands finds the character devices of a disk. Those of NVMe with several paths to one controller each are the subsystem's.
func commands(disk string) (found []Number) {
	device := filepath.Join(disk, "device")
	generic := strings.Replace(filepath.Base(disk), "nvme", "ng", 1)
	for _, pattern := range []string{"scsi_generic/*", "bsg/*", "../../nvme-generic/" + generic, generic, "", "nvme*"} {
		dirs, err := filepath.Glob(filepath.Join(device, pattern))
		if err != nil {
			continue // never: the pattern is right
		}
		for _, dir := range dirs {
			if subsystem, err := os.Readlink(filepath.Join(dir, "subsystem")); err != nil || filepath.Base(subsystem) == "block" {
				continue
			}
			if n, err := parseNumber(attribute(dir, "dev")); err == nil {
				found = append(found, n)
			}
		}
	}
	return found
}

// kpartx is how device mapper knows a partition that kpartx has made on a device, as of a multipath device.
var kpartx = regexp.MustCompile(`^part([0-9]+)-`)

// partOf is the disk that a device is a partition of, with the number there, or the device itself.
func partOf(dir string, n Number) (disk Number, part int, err error) {
	if number := attribute(dir, "partition"); number != "" {
		disk, err = parseNumber(attribute(filepath.Dir(dir), "dev"))
		part, _ = strconv.Atoi(number)
		return disk, part, err
	}
	match := kpartx.FindStringSubmatch(attribute(dir, "dm/uuid"))
	below := names(filepath.Join(dir, "slaves"))
	if match == nil || len(below) != 1 {
		return n, 0, nil
	}
	disk, err = parseNumber(attribute(filepath.Join(dir, "slaves", below[0]), "dev"))
	part, _ = strconv.Atoi(match[1])
	return disk, part, err
}

func start(dir string) int64 {
	sectors, err := strconv.ParseInt(attribute(dir, "start"), 10, 64)
	if err != nil {
		return 0 // it is no partition, or one of device mapper
	}
	return sectors * sector
}

// holders has the name that users know a device by beside the kernel's.
func holders(dir string) (found []string) {
	for _, name := range names(filepath.Join(dir, "holders")) {
		at := filepath.Join(dir, "holders", name)
		if mapped := attribute(at, "dm/name"); mapped != "" {
			kind, _, _ := strings.Cut(attribute(at, "dm/uuid"), "-")
			name = fmt.Sprintf("%s (%s of device mapper, %s)", name, mapped, cmp.Or(kind, "without uuid"))
		} else if level := attribute(at, "md/level"); level != "" {
			name = fmt.Sprintf("%s (%s of md)", name, level)
		}
		found = append(found, name)
	}
	return found
}

// originLayer ends the uuid of the device that LVM puts below a volume with snapshots, and below each of these (_add_new_lv_to_dtree of
// lib/activate/dev_manager.c).
const originLayer = "-real"

// snapshots are what else is made of the layer below a volume of LVM.
func snapshots(dir string) (found []string) {
	for _, name := range names(filepath.Join(dir, "slaves")) {
		layer := filepath.Join(dir, "slaves", name)
		if !strings.HasSuffix(attribute(layer, "dm/uuid"), originLayer) {
			continue
		}
		for _, holder := range holders(layer) {
			if own, _, _ := strings.Cut(holder, " "); own != filepath.Base(dir) {
				found = append(found, holder)
			}
		}
	}
	return found
}

// Overlapping are the other devices that have blocks of this one: its disk, or its partitions.
func (f Facts) Overlapping() []Number {
	if f.IsPartition() {
		return []Number{f.Disk}
	}
	return slices.Clone(f.Partitions)
}

// Siblings are the partitions of the disk of a partition, this one among them.
func (f Facts) Siblings() ([]Number, error) {
	dir, err := filepath.EvalSymlinks(filepath.Join(sysfs, f.Disk.String()))
	if err != nil {
		return nil, err
	}
	found, err := partitions(dir)
	for _, name := range names(filepath.Join(dir, "holders")) { // those of kpartx
		if n, parseErr := parseNumber(attribute(filepath.Join(dir, "holders", name), "dev")); parseErr == nil {
			found = append(found, n)
		}
	}
	return found, err
}

// Twins are the kernel's names of other disks of the same identity as the disk of this device: other paths to it, which the
// kernel does not know to be one. Their sizes and partitions are not compared: by one path they may not have been read since they
// changed. Those that multipathd or the NVMe driver has put together are not among them: they have no number, or are held.
func (f Facts) Twins() (found []string) {
	own, err := filepath.EvalSymlinks(filepath.Join(sysfs, f.Disk.String()))
	identity := known(own)
	if f.Alike == "" || err != nil || identity == "" {
		return nil
	}
	disk, part := DiskAndPart(identity)
	for _, name := range names(sysfs) {
		dir, err := filepath.EvalSymlinks(filepath.Join(sysfs, name))
		if err != nil || dir == own || attribute(dir, "partition") != "" || slices.Contains(f.Below, numberOf(dir)) {
			continue // it has just gone, is a part of another one, or is below this one
		}
		if d, p := DiskAndPart(known(dir)); d != disk || p != part {
			continue // it is another one
		}
		// The boot partitions of a card are disks of their own, which have its serial number.
		other := strings.HasPrefix(identity, "serial=") && attribute(dir, "size") != attribute(own, "size")
		if !other && extentOf(dir).overlaps(extentOf(own)) {
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

// numberOf is no device's where there is none.
func numberOf(dir string) Number {
	n, err := parseNumber(attribute(dir, "dev"))
	if err != nil {
		return Number{}
	}
	return n
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

// likeness is what a device is known by, alone or with others.
func likeness(dir string) string {
	disk, part := dir, ""
	if number := attribute(dir, "partition"); number != "" {
		disk, part = filepath.Dir(dir), "#"+number
	}
	whole := known(disk)
	if whole == "" {
		return ""
	}
	if offset := attribute(disk, "loop/offset"); offset != "" && offset != "0" {
		part = "@" + offset + part // another part of the file
	}
	return whole + part
}

// ownUUID is the uuid of a device of device mapper that no other one has: with a UUID of LVM or cryptsetup, or the number of a disk. Others are a name
// that was given to what is mapped, as by dm-crypt without a header (dm_prepare_uuid of cryptsetup), or what their program likes.
var ownUUID = regexp.MustCompile(`^(LVM-\w{64}|CRYPT-(LUKS[12]|VERITY)-[0-9a-f]{32}-|mpath-)`)

// noNumber is what a maker writes who gives a disk none.
var noNumber = regexp.MustCompile(`^(naa\.|eui\.|uuid\.|0x)?[-_: 0]+$`)

var placeOfQEMU = regexp.MustCompile(`^QM\d{5}$`)

// isIdentity says whether no other device is known by the same. The name by T10 may be of the vendor alone, if it does not have the serial number
// of the unit (SPC-4, 7.8.6.4 and 7.8.15). QEMU numbers the disks of a machine that are given none by their places (hw/ide/core.c, ide_init_drive),
// so that another one has the number when they are exchanged. A partition that kpartx has made is known by its number, and where it begins is not said.
// The file of a loop device is told by its path, in the mount namespace of the program that attached it: another file may have that.
func isIdentity(dir, likeness string) bool {
	name, _ := DiskAndPart(likeness)
	if mapped := attribute(dir, "dm/uuid"); mapped != "" && !ownUUID.MatchString(mapped) || noNumber.MatchString(name) || strings.HasPrefix(likeness, "backing_file=") {
		return false
	}
	if !strings.HasPrefix(name, "t10.") {
		return likeness != ""
	}
	if attribute(dir, "partition") != "" {
		dir = filepath.Dir(dir)
	}
	paths := []string{dir}
	for _, path := range names(filepath.Join(dir, "slaves")) { // of a multipath device
		paths = append(paths, filepath.Join(dir, "slaves", path))
	}
	return slices.ContainsFunc(paths, func(path string) bool {
		serial := serialOf(path)
		return serial != "" && strings.Contains(name, serial) && !placeOfQEMU.MatchString(serial)
	})
}

// serialOf is the serial number of a SCSI disk (SPC-4, 7.8.15), written as DiskAndPart does. One of zeroes is none.
func serialOf(disk string) string {
	const header = 4
	page, err := os.ReadFile(filepath.Join(disk, "device/vpd_pg80"))
	if err != nil || len(page) < header {
		return ""
	}
	serial := strings.Join(strings.Fields(strings.ReplaceAll(string(page[header:]), "\x00", " ")), "_")
	if strings.Trim(serial, "0_") == "" {
		return ""
	}
	return serial
}

// known is what a disk is known by, or the file of a loop device, whatever part of it that has.
func known(disk string) string {
	for _, name := range identities {
		if value := attribute(disk, name); value != "" {
			return filepath.Base(name) + "=" + value
		}
	}
	return ""
}

// An extent is a part of a file, in bytes.
type extent struct{ from, to uint64 }

// extentOf is what a loop device has of its file, and all for any other disk.
func extentOf(disk string) extent {
	from, err := strconv.ParseUint(attribute(disk, "loop/offset"), 10, 64)
	sectors, sizeErr := strconv.ParseUint(attribute(disk, "size"), 10, 64)
	if err != nil || sizeErr != nil {
		return extent{0, math.MaxUint64}
	}
	return extent{from, from + sectors*sector}
}

func (e extent) overlaps(other extent) bool { return e.from < other.to && other.from < e.to }

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
