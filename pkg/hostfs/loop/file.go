package loop

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// An Allocation says where the space of a file comes from.
type Allocation int

// The zero Allocation sets all of the space aside; a Thin file takes it as it is
// written, if it is still there then.
const (
	Thick Allocation = iota
	Thin
)

// stepBytes is how much is allocated in one system call at most. On tmpfs a signal undoes the
// call that it interrupts, so that one for everything might never end.
//
// Btrfs takes space from its disk in chunks of up to a gigabyte, and of a tenth of a smaller disk. For a call that does not fit
// into what is left of any it takes a new one, until none is left for its trees. So a call is for a small part of a chunk. A
// growth has as few calls as can be: when the program is killed between two of them, what it got stays until the growth is tried again.
//
// XFS wants as much free as the call has, and within the limit of the project, also
// for what is allocated already: where that is refused it is tried in smaller steps,
// down to leastStepBytes.
const (
	stepBytes      = 64 << 20
	steps          = 64
	leastStepBytes = 64 << 10
)

// defaultBlock is the block that every user of devices knows.
const defaultBlock = 512

// fsCompressed is FS_COMPR_FL of linux/fs.h. Btrfs gives it and FS_NOCOW_FL only to a file that has
// not had the other before the call.
const fsCompressed = 0x00000004

// A File is what a device can be attached to, open. It must be closed.
type File struct {
	f  *os.File
	id dir.ID
}

// Create makes an empty file in d. On btrfs it is one that is not copied on write:
// what was allocated for a file serves one write only there otherwise, and direct IO
// to it may store wrong checksums. It returns fs.ErrExist.
func Create(d *dir.Dir, name string) (*File, error) {
	f, err := d.MakeFile(name)
	if err != nil {
		return nil, err
	}
	file, err := adopt(f)
	if err == nil {
		err = noCopyOnWrite(f)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close(), d.Remove(name))
	}
	return file, nil
}

// Open opens a file in d. It never follows a link, and returns fs.ErrNotExist, or
// dir.ErrNotFile for what is no regular file.
func Open(d *dir.Dir, name string) (*File, error) {
	f, err := d.OpenFile(name)
	if err != nil {
		return nil, err
	}
	return adopt(f)
}

func adopt(f *os.File) (*File, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, errors.Join(&fs.PathError{Op: "stat", Path: f.Name(), Err: err}, f.Close())
	}
	return &File{f: f, id: dir.ID{Dev: st.Dev, Ino: st.Ino}}, nil
}

// noCopyOnWrite has an effect only on empty files (ioctl_iflags(2)).
func noCopyOnWrite(f *os.File) error {
	if is, err := onBtrfs(f); err != nil || !is {
		return err
	}
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err == nil && flags&fsCompressed != 0 {
		flags &^= fsCompressed
		err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags)
	}
	if err == nil {
		err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags|ioctl.NoCopyOnWrite)
	}
	if err != nil {
		return &fs.PathError{Op: "switch copy on write off", Path: f.Name(), Err: err}
	}
	return nil
}

func onBtrfs(f *os.File) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return false, &fs.PathError{Op: "statfs", Path: f.Name(), Err: err}
	}
	return uint32(st.Type) == unix.BTRFS_SUPER_MAGIC, nil
}

// KeepsDiscarded says that the filesystem keeps what users of a device discard as long as anything else of its extent is there, as btrfs does.
// What they write in its place takes space beside that, without bounds.
func (f *File) KeepsDiscarded() (bool, error) { return onBtrfs(f.f) }

// Close closes the file. Devices that are attached to it stay.
func (f *File) Close() error { return f.f.Close() }

// String is the path that the file was reached by.
func (f *File) String() string { return f.f.Name() }

// ID identifies the file, as Device.Backing does.
func (f *File) ID() dir.ID { return f.id }

// HandlePath names the file by its descriptor. It is valid until Close.
func (f *File) HandlePath() string { return dir.HandlePath(int(f.f.Fd())) }

// Writable opens the file for writing.
func (f *File) Writable() (*os.File, error) { return f.reopen(unix.O_RDWR) }

// Size is the size of the file, in bytes.
func (f *File) Size() (int64, error) {
	info, err := f.f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// Allocated is the space that the file has in its filesystem, in bytes.
func (f *File) Allocated() (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.f.Fd()), &st); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: f.f.Name(), Err: err}
	}
	return st.Blocks * 512, nil // whatever the block of the filesystem (stat(2))
}

// Grow gives the file a size, and with Thick all of its space, also what a user of a
// device discarded; what it holds stays. The answer comes when that is durable. A
// file that has it already is left as it is, one that is larger is ErrSize. A device
// on the file may be in use meanwhile, and gets larger by Kernel.Grow afterwards.
//
// On an error the file has the size that it had. Callers may test for unix.ENOSPC and
// unix.EDQUOT, for errors.ErrUnsupported where the filesystem cannot set space aside
// (NFS before 4.2, ZFS), and for the context's error.
func (f *File) Grow(ctx context.Context, bytes int64, how Allocation) error {
	before, err := f.Size()
	if err != nil {
		return err
	}
	if bytes <= 0 || bytes < before || bytes%Unit != 0 {
		return fmt.Errorf("%w: %d bytes for %s, which has %d", ErrSize, bytes, f, before)
	}
	w, err := f.reopen(unix.O_RDWR)
	if err != nil {
		return err
	}
	defer func() { _ = w.Close() }()
	if how == Thin {
		err = truncate(w, bytes)
	} else {
		err = allocate(ctx, w, before, bytes)
	}
	if err == nil {
		err = w.Sync()
	}
	if err != nil {
		// Filesystems keep what they had allocated past the end until it is cut off.
		return errors.Join(fmt.Errorf("grow %s to %d bytes: %w", f, bytes, err), truncate(w, before))
	}
	return nil
}

// Cut takes off what Grow added, back to a size that the file had. It is for a growth
// that no caller got an answer for: what is beyond is gone, and a device that has become larger
// would have no file there.
func (f *File) Cut(bytes int64) error {
	w, err := f.reopen(unix.O_RDWR)
	if err != nil {
		return err
	}
	return errors.Join(truncate(w, bytes), w.Sync(), w.Close())
}

func allocate(ctx context.Context, w *os.File, before, bytes int64) error {
	most := int64(stepBytes)
	if before == 0 {
		most = min(most, max(leastStepBytes, bytes/steps/Unit*Unit))
	}
	for at := int64(0); at < bytes; {
		if err := ctx.Err(); err != nil {
			return err
		}
		step := min(most, bytes-at)
		err := unix.Fallocate(int(w.Fd()), 0, at, step)
		switch {
		case errors.Is(err, unix.EINTR):
			continue // what it has done so far makes the next try shorter
		case isFull(err) && step > leastStepBytes:
			most = step / 2 / Unit * Unit
			continue
		case err != nil:
			return &fs.PathError{Op: "fallocate", Path: w.Name(), Err: err}
		}
		at += step
	}
	return nil
}

func isFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

func truncate(w *os.File, bytes int64) error {
	for {
		err := unix.Ftruncate(int(w.Fd()), bytes)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return &fs.PathError{Op: "truncate", Path: w.Name(), Err: err}
		}
	}
}

// reopen opens the same file once more, in a mode of its own: for a device, which
// keeps what it is given, and for writing.
func (f *File) reopen(flags int) (*os.File, error) {
	fd, err := unix.Open(f.HandlePath(), flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: f.f.Name(), Err: err}
	}
	return os.NewFile(uintptr(fd), f.f.Name()), nil
}

// BlockBytes is the smallest logical block of a device on the file that allows direct
// IO, and 512 where none does. The filesystem says it (statx(2), STATX_DIOALIGN,
// Linux 6.1); where it does not, the block of its device is what the loop driver goes by.
func (f *File) BlockBytes() (int64, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(f.f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err != nil {
		return 0, &fs.PathError{Op: "statx", Path: f.f.Name(), Err: err}
	}
	if st.Mask&unix.STATX_DIOALIGN != 0 {
		return usableBlock(int64(st.Dio_offset_align)), nil
	}
	var fsys unix.Statfs_t
	if err := unix.Fstatfs(int(f.f.Fd()), &fsys); err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: f.f.Name(), Err: err}
	}
	if uint32(fsys.Type) == unix.BTRFS_SUPER_MAGIC {
		// The loop driver does not report it, but btrfs falls back to the page cache for less
		// than a whole block.
		return usableBlock(int64(fsys.Bsize)), nil
	}
	return deviceBlock(f.id.Dev), nil
}

// deviceBlock is the logical block of a device, which for a partition is that of the
// disk; 512 for filesystems that have none, such as tmpfs.
func deviceBlock(dev uint64) int64 {
	base := fmt.Sprintf("/sys/dev/block/%d:%d/", unix.Major(dev), unix.Minor(dev))
	for _, queue := range []string{"queue/", "../queue/"} {
		content, err := os.ReadFile(base + queue + "logical_block_size")
		if err != nil {
			continue
		}
		if block, err := strconv.ParseInt(strings.TrimSpace(string(content)), 10, 64); err == nil {
			return usableBlock(block)
		}
	}
	return defaultBlock
}

// usableBlock is the block for direct IO of that alignment, if there is one.
func usableBlock(align int64) int64 {
	if align <= defaultBlock || align > Unit {
		return defaultBlock
	}
	return align
}
