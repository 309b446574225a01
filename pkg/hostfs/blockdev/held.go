package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// Unit is what offsets and lengths of a device are multiples of, in bytes (BLKZEROOUT wants 512, and no device of
// today has blocks beyond this).
const Unit = 4096

// A Held device is held exclusively: until Close no filesystem on it or on a partition of it can be
// mounted, and neither swap, device mapper nor md can take it (open(2), O_EXCL).
type Held struct {
	file   *os.File
	number Number
}

// Hold opens the device at a path exclusively, and for reading: the kernel refuses every write through what is returned.
func Hold(path string) (*Held, error) {
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
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", at), unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, explain("open", path, err)
	}
	return &Held{os.NewFile(uintptr(fd), path), n}, nil
}

// Close lets go of the device.
func (d *Held) Close() error { return d.file.Close() }

// Number identifies the device.
func (d *Held) Number() Number { return d.number }

// String is the path that the device was opened by.
func (d *Held) String() string { return d.file.Name() }

// File is the descriptor, to be inherited by a program.
func (d *Held) File() *os.File { return d.file }

// Size is the size of the device, in bytes (BLKGETSIZE64).
func (d *Held) Size() (int64, error) {
	var bytes uint64
	if err := ioctl.Do(ioctl.File{File: d.file}, unix.BLKGETSIZE64, &bytes); err != nil {
		return 0, d.failed("BLKGETSIZE64", err)
	}
	return int64(bytes), nil
}

// ReadEnds reads both ends of the device, where signatures are. Its error is why one of them cannot be read: to libblkid,
// such a device looks like an empty one.
func (d *Held) ReadEnds() error {
	size, err := d.Size()
	if err != nil {
		return err
	}
	end := min(size, probed)
	for _, offset := range []int64{0, size - end} {
		if err := read(context.Background(), d.file, Span{offset, offset + end}, func([]byte) bool { return true }); err != nil {
			return err
		}
	}
	return nil
}

// Zeroes reports whether a part of the device reads as zeroes, what the page cache has of it left aside: another machine may
// have written to the device.
func (d *Held) Zeroes(ctx context.Context, offset, bytes int64) (bool, error) {
	return zeroes(ctx, d.file, Span{offset, offset + bytes})
}

// Writable reports what keeps the device from being written, if it can be known without opening it exclusively:
// BLKROGET is the answer that counts for a descriptor.
func (d *Held) Writable() error {
	value, err := unix.IoctlGetInt(int(d.file.Fd()), unix.BLKROGET)
	if err != nil {
		return d.failed("BLKROGET", err)
	}
	if value != 0 {
		return fmt.Errorf("%s: %w", d, ErrReadOnly)
	}
	return nil
}

// A Writer overwrites a device that is held.
type Writer struct {
	file *os.File
	held *Held
}

// ForWriting opens the device for writing too, by what is held, whatever its path leads to now. The Writer has to be closed first.
func (d *Held) ForWriting() (*Writer, error) {
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", d.file.Fd()), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, explain("open for writing", d.file.Name(), err)
	}
	return &Writer{os.NewFile(uintptr(fd), d.file.Name()), d}, nil
}

// Close lets the device be held for reading alone.
func (w *Writer) Close() error { return w.file.Close() }

// File is the descriptor, to be inherited by a program.
func (w *Writer) File() *os.File { return w.file }

// Zero writes zeroes (BLKZEROOUT). The kernel has the device do so itself if it can. The space stays allocated where
// the device has thin provisioning.
func (w *Writer) Zero(offset, bytes int64) error {
	return w.ranged("BLKZEROOUT", unix.BLKZEROOUT, offset, bytes)
}

// Deallocate gives space back, so that it reads as zeroes. A device that cannot promise the zeroes is
// errors.ErrUnsupported: for devices the kernel makes FALLOC_FL_PUNCH_HOLE of it, with no fallback to writing
// (blkdev_fallocate of linux/block/fops.c, since 4.9).
func (w *Writer) Deallocate(offset, bytes int64) error {
	err := retry(func() error {
		return unix.Fallocate(int(w.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, offset, bytes)
	})
	return w.held.failed("punch hole", err)
}

// SecureErase has the device erase all copies of what was there (BLKSECDISCARD). One that cannot is
// errors.ErrUnsupported.
func (w *Writer) SecureErase(offset, bytes int64) error {
	return w.ranged("BLKSECDISCARD", unix.BLKSECDISCARD, offset, bytes)
}

// Sync waits until all that was written is on the device, through its cache.
func (w *Writer) Sync() error {
	return w.held.failed("fsync", retry(func() error { return unix.Fsync(int(w.file.Fd())) }))
}

// ForgetPartitions has the kernel read the partition table again (BLKRRPART): after it was erased, there are none. Only who holds the device may.
func (w *Writer) ForgetPartitions() error {
	return w.held.failed("BLKRRPART", ioctl.Do(ioctl.File{File: w.held.file}, unix.BLKRRPART, (*int)(nil)))
}

func (w *Writer) ranged(name string, request uintptr, offset, bytes int64) error {
	area := [2]uint64{uint64(offset), uint64(bytes)}
	return w.held.failed(name, retry(func() error { return ioctl.Do(ioctl.File{File: w.file}, request, &area) }))
}

func (d *Held) failed(op string, err error) error {
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
