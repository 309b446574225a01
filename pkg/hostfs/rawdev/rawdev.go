// Package rawdev opens block devices so that nobody else can claim them meanwhile, overwrites them, and reports
// what the kernel knows of who uses them. Which device may be used for what is left to others.
package rawdev

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Errors that callers may test for.
var (
	// ErrNotBlock is for what is no block device.
	ErrNotBlock = errors.New("not a block device")
	// ErrBusy is for a device that is mounted, swapped to, part of another device, or else held exclusively.
	ErrBusy = errors.New("in use")
	// ErrReadOnly is for a device that the kernel does not let be written.
	ErrReadOnly = errors.New("read-only")
	// ErrGone is for a path at which there is no device, or none any more.
	ErrGone = errors.New("no such device")
)

// Unit is what offsets and lengths of a device are multiples of, in bytes (BLKZEROOUT wants 512, and no device of
// today has blocks beyond this).
const Unit = 4096

// A Number identifies a block device of the running system, whatever paths lead to it.
type Number struct{ Major, Minor uint32 }

// String is the form that sysfs has.
func (n Number) String() string { return fmt.Sprintf("%d:%d", n.Major, n.Minor) }

// At is the number of the device at a path, after all links. It opens no device.
func At(path string) (Number, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return Number{}, explain("stat", path, err)
	}
	return number(path, &st)
}

func number(path string, st *unix.Stat_t) (Number, error) {
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return Number{}, fmt.Errorf("%s: %w", path, ErrNotBlock)
	}
	return Number{unix.Major(st.Rdev), unix.Minor(st.Rdev)}, nil
}

func explain(op, path string, err error) error {
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%s %s: %w", op, path, ErrBusy)
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%s %s: %w", op, path, ErrReadOnly)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ELOOP):
		return fmt.Errorf("%s %s: %w (%v)", op, path, ErrGone, err)
	}
	return &os.PathError{Op: op, Path: path, Err: err}
}

// A Device is open for writing and held exclusively: until Close no filesystem on it or on a partition of it can be
// mounted, and neither swap, device mapper nor md can take it (open(2), O_EXCL).
type Device struct {
	file   *os.File
	number Number
}

// Open opens the device at a path exclusively.
func Open(path string) (*Device, error) {
	// What is no block device is not opened: opening a tape rewinds it.
	at, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, explain("open", path, err)
	}
	defer func() { _ = unix.Close(at) }()
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return nil, explain("stat", path, err)
	}
	n, err := number(path, &st)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", at), unix.O_RDWR|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, explain("open", path, err)
	}
	return &Device{os.NewFile(uintptr(fd), path), n}, nil
}

// Close lets go of the device.
func (d *Device) Close() error { return d.file.Close() }

// Number identifies the device.
func (d *Device) Number() Number { return d.number }

// String is the path that the device was opened by.
func (d *Device) String() string { return d.file.Name() }

// File is the descriptor, to be inherited by a program.
func (d *Device) File() *os.File { return d.file }

// Size is the size of the device, in bytes (BLKGETSIZE64).
func (d *Device) Size() (int64, error) {
	var bytes uint64
	if err := d.ioctl(unix.BLKGETSIZE64, unsafe.Pointer(&bytes)); err != nil {
		return 0, d.failed("BLKGETSIZE64", err)
	}
	return int64(bytes), nil
}

// probed is how much of each end libblkid reads to find a signature, in bytes: VMFS, which has the innermost one, begins at
// 2 MiB.
const probed = 4 << 20

// ReadEnds reads both ends of the device, where signatures are. Its error is why one of them cannot be read: to libblkid,
// such a device looks like an empty one.
func (d *Device) ReadEnds() error {
	size, err := d.Size()
	if err != nil {
		return err
	}
	end := make([]byte, min(size, probed))
	for _, offset := range []int64{0, size - int64(len(end))} {
		if _, err := d.file.ReadAt(end, offset); err != nil {
			return explain("read", d.file.Name(), err)
		}
	}
	return nil
}

// Zero writes zeroes (BLKZEROOUT). The kernel has the device do so itself if it can. The space stays allocated where
// the device has thin provisioning.
func (d *Device) Zero(offset, bytes int64) error {
	return d.ranged("BLKZEROOUT", unix.BLKZEROOUT, offset, bytes)
}

// Deallocate gives space back, so that it reads as zeroes. A device that cannot promise the zeroes is
// errors.ErrUnsupported: for devices the kernel makes FALLOC_FL_PUNCH_HOLE of it, with no fallback to writing
// (blkdev_fallocate of linux/block/fops.c, since 4.9).
func (d *Device) Deallocate(offset, bytes int64) error {
	err := retry(func() error {
		return unix.Fallocate(int(d.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, offset, bytes)
	})
	return d.failed("punch hole", err)
}

// SecureErase has the device erase all copies of what was there (BLKSECDISCARD). One that cannot is
// errors.ErrUnsupported.
func (d *Device) SecureErase(offset, bytes int64) error {
	return d.ranged("BLKSECDISCARD", unix.BLKSECDISCARD, offset, bytes)
}

// Sync waits until all that was written is on the device, through its cache.
func (d *Device) Sync() error {
	return d.failed("fsync", retry(func() error { return unix.Fsync(int(d.file.Fd())) }))
}

// ForgetPartitions has the kernel read the partition table again (BLKRRPART): after it was erased, there are none.
func (d *Device) ForgetPartitions() error {
	return d.failed("BLKRRPART", d.ioctl(unix.BLKRRPART, nil))
}

func (d *Device) ranged(name string, request uintptr, offset, bytes int64) error {
	area := [2]uint64{uint64(offset), uint64(bytes)}
	return d.failed(name, retry(func() error { return d.ioctl(request, unsafe.Pointer(&area)) }))
}

func (d *Device) ioctl(request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, d.file.Fd(), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

func (d *Device) failed(op string, err error) error {
	if err == nil {
		return nil
	}
	return explain(op, d.file.Name(), err)
}

func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
