package blockdev

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A Device was found at a path, and is not open. It is known by its number: the path may lead to another one later.
type Device struct {
	path   string
	number Number
}

// Find takes the number of the device at a path, following links.
func Find(path string) (Device, error) {
	number, err := At(path)
	return Device{path, number}, err
}

// Number identifies the device.
func (d Device) Number() Number { return d.number }

// String is the path that the device was found by, and its number.
func (d Device) String() string { return fmt.Sprintf("%s (%s)", d.path, d.number) }

// Path is where the device was found.
func (d Device) Path() string { return d.path }

func (d Device) sys(elements ...string) string {
	return path.Join(sysfs, d.number.String(), path.Join(elements...))
}

// attribute reads a file of sysfs (Documentation/ABI/stable/sysfs-block).
func (d Device) attribute(elements ...string) (string, error) {
	content, err := os.ReadFile(d.sys(elements...))
	return strings.TrimSpace(string(content)), err
}

// SizeBytes is the capacity of the device. It asks sysfs, and so does not open the device.
func (d Device) SizeBytes() (int64, error) {
	sectors, err := d.attribute("size")
	if err != nil {
		return 0, fmt.Errorf("size of %s: %w", d, err)
	}
	count, err := strconv.ParseInt(sectors, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("size of %s: %w", d, err)
	}
	return count * sector, nil
}

// sector is the unit of sizes in sysfs, in bytes, whatever blocks the device has.
const sector = 512

// HostName is the path by which the host knows the device: /dev/sdb, /dev/nvme0n1p2, or
// /dev/mapper/NAME for those of device mapper.
func (d Device) HostName() (string, error) {
	name, err := d.attribute("dm", "name")
	if err == nil && plain(name) {
		return "/dev/mapper/" + name, nil
	}
	name, err = d.event("DEVNAME")
	if err != nil {
		return "", err
	}
	return path.Join("/dev", path.Clean("/"+name)), nil
}

// event is a value of those that the kernel announces the device with.
func (d Device) event(key string) (string, error) {
	events, err := d.attribute("uevent")
	if err != nil {
		return "", fmt.Errorf("find %s of %s: %w", key, d, err)
	}
	for line := range strings.Lines(events) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), key+"="); ok {
			return value, nil
		}
	}
	return "", fmt.Errorf("find %s of %s: the kernel has none: %w", key, d, errors.ErrUnsupported)
}

// plain reports whether device mapper's udev rules use a name as it is.
func plain(name string) bool {
	const allowed = "#+-.:=@_"
	for _, c := range name {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && !strings.ContainsRune(allowed, c) {
			return false
		}
	}
	return name != "" && name != "." && name != ".."
}

// Node makes a node of the device at a path, with the directories on the way to it. It returns
// fs.ErrExist if something else is there.
func (d Device) Node(at string) error {
	if err := os.MkdirAll(path.Dir(at), 0o755); err != nil {
		return err
	}
	err := unix.Mknod(at, unix.S_IFBLK|0o600, int(d.number.Dev()))
	if errors.Is(err, unix.EEXIST) {
		if there, findErr := Find(at); findErr == nil && there.number == d.number {
			return nil
		}
	}
	if err != nil {
		return &fs.PathError{Op: "mknod", Path: at, Err: err}
	}
	return nil
}

// Instance distinguishes this device from any other that had or will have its number: the kernel
// numbers disks in the order of their appearance (diskseq), anew after each boot. It returns errors.ErrUnsupported where the kernel does not,
// before Linux 5.15.
func (d Device) Instance() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	sequence, err := d.event("DISKSEQ") // a partition has that of its disk
	if err != nil {
		return "", err
	}
	return strings.Join([]string{strings.TrimSpace(string(boot)), sequence, d.number.String()}, "/"), nil
}

// CheckUnused returns ErrBusy if the device is mounted anywhere on the node, in whatever
// namespace, or another device is made of it, such as a multipath device or a RAID.
func (d Device) CheckUnused() error {
	f, err := d.open(unix.O_RDONLY | unix.O_EXCL)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%s: block device is %w%s", d, ErrBusy, d.holders())
	}
	if err != nil {
		return err
	}
	return f.Close()
}

// holders names the devices that are made of this one.
func (d Device) holders() string {
	found := names(d.sys("holders"))
	if len(found) == 0 {
		return ""
	}
	return " by " + strings.Join(found, ", ")
}

func (d Device) open(flags int) (*os.File, error) {
	fd, err := unix.Open(d.path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: d.path, Err: err}
	}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFBLK || st.Rdev != d.number.Dev()) {
		err = fmt.Errorf("is not %s any more", d.number.String())
	}
	if err != nil {
		return nil, errors.Join(&fs.PathError{Op: "open", Path: d.path, Err: err}, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), d.path), nil
}

// head is what has to be zero of a blank device, in bytes: the first block, which hardly any use of a device leaves empty.
const head = 4096

// StartsBlank reads both ends of the device, where signatures are, and reports whether its first
// 4096 bytes are zero. A device that cannot be read is an error, and never blank.
func (d Device) StartsBlank() (bool, error) {
	f, err := d.open(unix.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return false, fmt.Errorf("size of %s: %w", d, err)
	}
	if size < head {
		return false, fmt.Errorf("%s has %d bytes: too small to hold anything", d, size)
	}
	begin := make([]byte, min(size, probed))
	if _, err := f.ReadAt(begin, 0); err != nil {
		return false, explain("read the start of", d.path, err)
	}
	blank := bytes.Equal(begin[:head], make([]byte, head))
	if _, err := f.ReadAt(begin, size-int64(len(begin))); err != nil {
		return false, explain("read the end of", d.path, err)
	}
	return blank, nil
}

// Erase overwrites the first MiB with zeros, durably. It returns ErrBusy for a device in use.
func (d Device) Erase() (err error) {
	f, err := d.open(unix.O_RDWR | unix.O_EXCL)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%s: block device is %w%s", d, ErrBusy, d.holders())
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.WriteAt(make([]byte, 1<<20), 0); err != nil {
		return explain("overwrite the start of", d.path, err)
	}
	return f.Sync()
}

// ByteAt reads one byte of the device.
func (d Device) ByteAt(offset int64) (byte, error) {
	f, err := d.open(unix.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, offset); err != nil {
		return 0, explain("read", d.path, err)
	}
	return b[0], nil
}
