// Package clone makes copies of files and of directory trees: copies that share their
// blocks with the source where the filesystem can do that (FICLONE on XFS and btrfs,
// snapshots of btrfs subvolumes), and copies that keep holes where it cannot. A copied
// tree has the names, hard links, owners, modes, times, ACLs, capabilities and other
// extended attributes of its source, and no others.
//
// [Tree] also reports how consistent a copy of a tree is that was in use meanwhile. What
// to do with that answer, and where copies are kept, is decided elsewhere.
package clone

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// ErrNotSupported reports a filesystem whose files cannot share blocks, or which has no
// subvolumes.
var ErrNotSupported = errors.New("not supported by this filesystem")

// A Method is how the content of a file is copied.
type Method int

const (
	// Share has the copy share the blocks of the source (ioctl_ficlone(2)). The copy of a
	// file is atomic: no write is in it by half.
	Share Method = iota
	// Copy reads and writes all data, and keeps holes (lseek(2), SEEK_DATA). The copy shares nothing.
	Copy
)

// File makes dst, an empty regular file that is open for writing, a copy of src. It
// returns ErrNotSupported where Share is not possible. Nothing is synced. The end of ctx ends
// Copy, within 16 MiB.
func File(ctx context.Context, dst, src *os.File, method Method) error {
	var err error
	if method == Share {
		err = share(int(dst.Fd()), int(src.Fd()))
	} else {
		err = copyData(int(dst.Fd()), int(src.Fd()), ctx.Err, make([]byte, bufferBytes))
	}
	if err != nil {
		return fmt.Errorf("clone %s to %s: %w", src.Name(), dst.Name(), err)
	}
	return nil
}

// Supported reports whether files of the filesystem of d can share blocks. It tries with two
// empty files that have no name (O_TMPFILE).
func Supported(d *dir.Dir) (bool, error) {
	var files [2]int
	for i := range files {
		fd, err := unix.Openat(d.Fd(), ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ENOENT) {
			return false, nil // no filesystem whose files share blocks is without O_TMPFILE
		}
		if err != nil {
			return false, &fs.PathError{Op: "make a file without a name in", Path: d.String(), Err: err}
		}
		defer func() { _ = unix.Close(fd) }() // nothing is in it
		files[i] = fd
	}
	err := share(files[0], files[1])
	if errors.Is(err, ErrNotSupported) || errors.Is(err, unix.EINVAL) {
		return false, nil
	}
	return err == nil, err
}

// share is FICLONE. On btrfs, files with and without copy-on-write share no blocks
// (EINVAL): then the copy gets that flag as the source has it, which only an empty file can.
func share(dst, src int) error {
	return tryShare(dst, src, func() error { return unix.IoctlFileClone(dst, src) })
}

// shareRange is FICLONERANGE between two offsets, which are multiples of a block, or the end of the file.
func shareRange(dst, src int, from, to int64) error {
	if from == to { // the kernel would take that for all that follows
		return nil
	}
	at := unix.FileCloneRange{Src_fd: int64(src), Src_offset: uint64(from), Src_length: uint64(to - from), Dest_offset: uint64(from)}
	return tryShare(dst, src, func() error { return unix.IoctlFileCloneRange(dst, &at) })
}

func tryShare(dst, src int, share func() error) error {
	err := share()
	if errors.Is(err, unix.EINVAL) && sameCopyOnWrite(dst, src) == nil {
		err = share()
	}
	// EXDEV on filesystems that share within one mount only; EINVAL and EISDIR are bugs.
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EXDEV) {
		return fmt.Errorf("%w: %w", ErrNotSupported, err)
	}
	return err
}

// sameCopyOnWrite also takes compression off the copy, which has it from its directory and without
// copy-on-write cannot have it. If the source is compressed, an attribute says so, which is copied later.
func sameCopyOnWrite(dst, src int) error {
	flags, err := unix.IoctlGetUint32(src, unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	wanted := flags & ioctl.NoCopyOnWrite
	flags, err = unix.IoctlGetUint32(dst, unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	flags &^= ioctl.NoCopyOnWrite | ioctl.Compressed
	if err := unix.IoctlSetPointerInt(dst, unix.FS_IOC_SETFLAGS, int(flags)); err != nil || wanted == 0 {
		return err
	}
	return unix.IoctlSetPointerInt(dst, unix.FS_IOC_SETFLAGS, int(flags|wanted)) // not in one step with the other
}

// chunk is how many bytes are copied between two calls of pause.
const chunk = 16 << 20

// bufferBytes is how many bytes are read at a time.
const bufferBytes = 1 << 20

// copyData gives a file the size of another, has what is no hole there copied, and calls pause before each chunk. It reads and writes: where the
// filesystem can share blocks, copy_file_range(2) has the copy share them.
func copyData(dst, src int, pause func() error, buffer []byte) error {
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil {
		return err
	}
	// A writer may let the file grow meanwhile: the copy has the size that it had. It has it first, since
	// XFS sets blocks aside behind what makes a file longer, which may be a hole, and extends one only when all
	// that was written to it is on the disk.
	if err := unix.Ftruncate(dst, st.Size); err != nil {
		return err
	}
	data := DataOf(src)
	return data.each(0, st.Size, pause, func(from, to int64) error { return data.copyRange(dst, from, to, buffer) })
}

// Data is what of an open file is no hole. It asks once whether the kernel knows that.
type Data struct {
	fd           int
	asked, known bool
}

// DataOf is that of a file.
func DataOf(fd int) *Data { return &Data{fd: fd} }

// each calls do for each piece of what is no hole between two offsets, and pause before each.
func (d *Data) each(at, end int64, pause func() error, do func(from, to int64) error) error {
	for at < end {
		from, to, err := d.Next(at, end)
		if err != nil {
			return err
		}
		for from < to {
			if err := pause(); err != nil {
				return err
			}
			next := from + min(to-from, chunk)
			if err := do(from, next); err != nil {
				return err
			}
			from = next
		}
		at = to
	}
	return nil
}

// Next is where the next data from at on lies: from == to == size if there is none, or if the file was cut off meanwhile. Where it is not known
// where holes are, all may be data.
func (d *Data) Next(at, size int64) (from, to int64, err error) {
	if known, err := d.KnowsHoles(); err != nil || !known {
		return at, size, err
	}
	from, err = unix.Seek(d.fd, at, unix.SEEK_DATA)
	if err == nil {
		to, err = unix.Seek(d.fd, from, unix.SEEK_HOLE)
	}
	if errors.Is(err, unix.ENXIO) {
		from, to, err = size, size, nil
	}
	// In the last page that any file can have the kernel finds no data before it is on the disk.
	const page = 64 << 10 // or less
	if last := int64(math.MaxInt64 / page * page); err == nil && at < size && from >= last {
		from, to = max(at, last), size
	}
	return min(from, size), min(to, size), err
}

// KnowsHoles says that the kernel finds all data of the file (lseek(2), SEEK_DATA), also what is in memory alone. ZFS has taken for holes what was
// just written (openzfs/zfs#15526): a copy would have zeros there, and a comparison, which looks in the same way, would not show it.
func (d *Data) KnowsHoles() (bool, error) {
	if d.asked {
		return d.known, nil
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.fd, &st); err != nil {
		return false, os.NewSyscallError("fstatfs", err)
	}
	switch int64(st.Type) {
	case unix.XFS_SUPER_MAGIC, unix.EXT4_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.TMPFS_MAGIC:
		d.known = true
	}
	d.asked = true
	return d.known, nil
}

// copyRange copies what lies between two offsets to the same ones, where the copy has nothing yet, as far as the file goes by now. Where it is not
// known where holes are, what is zero becomes one.
func (d *Data) copyRange(dst int, from, to int64, buffer []byte) error {
	known, err := d.KnowsHoles()
	if err != nil {
		return err
	}
	for from < to {
		data := buffer[:min(to-from, int64(len(buffer)))]
		n, err := retryInterrupted(func() (int, error) { return unix.Pread(d.fd, data, from) })
		if err != nil || n == 0 { // cut off meanwhile
			return err
		}
		if data = data[:n]; known || !isZero(data) {
			if err := writeAt(dst, data, from); err != nil {
				return err
			}
		}
		from += int64(n)
	}
	return nil
}

func isZero(data []byte) bool {
	return len(data) == 0 || data[0] == 0 && bytes.Equal(data[1:], data[:len(data)-1])
}

func writeAt(dst int, data []byte, at int64) error {
	for len(data) > 0 {
		n, err := retryInterrupted(func() (int, error) { return unix.Pwrite(dst, data, at) })
		if err != nil {
			return err
		}
		data = data[n:]
		at += int64(n)
	}
	return nil
}

func retryInterrupted(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// Sync writes all of the filesystem of d to its disk (syncfs(2)): one call makes a whole
// copied tree durable, where an fsync of each file takes hundreds of times as long.
func Sync(d *dir.Dir) error {
	fd, err := d.ReadFd()
	if err != nil {
		return err
	}
	for {
		err := unix.Syncfs(fd)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("sync the filesystem of %s: %w", d, err)
		}
	}
}
