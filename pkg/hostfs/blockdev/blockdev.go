// Package blockdev knows block devices: which one a path leads to, what the kernel says of it and of who uses it, and
// whether it is blank. It holds one so that no other process can claim it meanwhile, and overwrites it. Which device may be
// used for what is left to others.
package blockdev

import (
	"errors"
	"fmt"
	"io/fs"

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

// A Number identifies a block device of the running system, whatever paths lead to it.
type Number struct{ Major, Minor uint32 }

// String is the form that sysfs has.
func (n Number) String() string { return fmt.Sprintf("%d:%d", n.Major, n.Minor) }

// Dev is the number as in st_dev of stat(2), of a filesystem that is on the device.
func (n Number) Dev() uint64 { return unix.Mkdev(n.Major, n.Minor) }

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
	var of *fs.PathError
	if errors.As(err, &of) { // which names the path again
		err = of.Err
	}
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%s %s: %w", op, path, ErrBusy)
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%s %s: %w", op, path, ErrReadOnly)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ELOOP):
		return fmt.Errorf("%s %s: %w (%w)", op, path, ErrGone, err)
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}

// probed is how much of each end libblkid reads to find a signature, in bytes: VMFS, which has the innermost one, begins at
// 2 MiB.
const probed = 4 << 20
