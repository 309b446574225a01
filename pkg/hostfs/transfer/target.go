package transfer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

type targetKind int

const (
	aFile targetKind = iota
	aNode
	aDirectory
)

// A target is an entry that is being made equal to one of the source.
type target struct {
	kind   targetKind
	id     uint64 // of a file
	failed bool   // there was no room: the rest of it is ignored
	lost   bool   // so it was for its directory
	pushed bool
	fresh  bool // a file that was made empty
	based  bool // a file that is as in the base

	fd   int      // of a file
	dir  int      // of a directory, not closed
	in   *dir.Dir // of a node, with its name: it is the current directory
	name string
	path string // for messages

	want     *unix.Stat_t
	holder   xattr.Holder
	names    strings.Builder // of the attributes that were set, each with a NUL after it
	next     int64           // what of a file was not asked for yet
	finished bool            // its attributes were set
}

func (t *target) close() {
	if t.fd != notOpen {
		_ = unix.Close(t.fd) // what was written is made durable as a whole
	}
	t.fd = notOpen
}

func wrap(op, path string, err error) error {
	if err != nil {
		return &fs.PathError{Op: op, Path: path, Err: err}
	}
	return nil
}

// setTimes sets those that differ. An mtime that the filesystem cannot have is an error of each pass: the last one is too late.
func setTimes(in int, name string, flags int, want *unix.Stat_t, path string) error {
	var is unix.Stat_t
	if err := unix.Fstatat(in, name, &is, flags); err != nil {
		return wrap("stat", path, err)
	}
	if is.Atim == want.Atim && is.Mtim == want.Mtim {
		return nil
	}
	times := []unix.Timespec{want.Atim, want.Mtim}
	if err := unix.UtimesNanoAt(in, name, times, flags); err != nil {
		return wrap("set the times of", path, err)
	}
	if err := unix.Fstatat(in, name, &is, flags); err != nil {
		return wrap("stat", path, err)
	}
	if is.Mtim != want.Mtim { // the kernel has taken the nearest that the filesystem can have, and the trees would differ for ever
		return wrap("set the times of", path, fmt.Errorf("the filesystem has no mtime of %s", time.Unix(want.Mtim.Unix()).UTC().Format(time.RFC3339Nano)))
	}
	return nil
}

// lookFor returns nil for a missing name.
func lookFor(in *dir.Dir, name string) (*unix.Stat_t, error) {
	st := new(unix.Stat_t)
	err := unix.Fstatat(in.Fd(), name, st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, pathError("stat", in, name, err)
	}
	return st, nil
}

// remove removes an entry. A file gives its blocks back first: XFS counts them until some time after the last name is gone.
func remove(ctx context.Context, in *dir.Dir, name string) error {
	is, err := lookFor(in, name)
	if err != nil || is == nil {
		return err
	}
	if format(is) == unix.S_IFREG && is.Nlink == 1 {
		fd, err := unix.Openat(in.Fd(), name, unix.O_WRONLY|unix.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return pathError("truncate", in, name, err)
		}
		_ = unix.Close(fd) // nothing was written
	}
	return dir.RemoveTree(ctx, in, name, func(ctx context.Context) error { return ctx.Err() })
}

// openFile opens what was just seen to be a regular file.
func openFile(in *dir.Dir, name string, access int) (int, error) {
	fd, err := unix.Openat(in.Fd(), name, access|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOATIME|unix.O_CLOEXEC, 0)
	if err != nil {
		return notOpen, pathError("open", in, name, err)
	}
	return fd, nil
}

func makeFile(in *dir.Dir, name string) (int, error) {
	fd, err := unix.Openat(in.Fd(), name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return notOpen, pathError("create", in, name, err)
	}
	return fd, nil
}

// separate makes a file that has the content of what has its name, which is open and with which it had that in common.
func separate(ctx context.Context, in *dir.Dir, name string, old int) (int, error) {
	src := os.NewFile(uintptr(old), name)
	defer func() { _ = src.Close() }() // opened for reading
	if err := in.Remove(name); err != nil {
		return notOpen, err
	}
	fd, err := makeFile(in, name)
	if err != nil {
		return notOpen, err
	}
	dst := os.NewFile(uintptr(fd), name)
	defer func() { _ = dst.Close() }() // it has another descriptor by then
	// Not shared: where XFS writes to shared blocks, it sets blocks around aside, which are no holes then.
	if err := clone.File(ctx, dst, src, clone.Copy); err != nil {
		return notOpen, err
	}
	if fd, err = unix.FcntlInt(dst.Fd(), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return notOpen, pathError("open", in, name, err)
	}
	return fd, nil
}

// setAttributes is for an entry that is not opened. It is no link, or one that must not be followed.
func setAttributes(in *dir.Dir, name string, want *unix.Stat_t, path string) error {
	if err := setOwner(in, name, want, path); err != nil {
		return err
	}
	return setTimes(in.Fd(), name, unix.AT_SYMLINK_NOFOLLOW, want, path)
}

func setOwner(in *dir.Dir, name string, want *unix.Stat_t, path string) error {
	is, err := stat(in, name)
	if err == nil && (is.Uid != want.Uid || is.Gid != want.Gid) {
		err = unix.Fchownat(in.Fd(), name, int(want.Uid), int(want.Gid), unix.AT_SYMLINK_NOFOLLOW)
		is.Mode |= unix.S_ISUID // may be off now: chown(2)
	}
	if err == nil && format(is) != unix.S_IFLNK && is.Mode&0o7777 != want.Mode&0o7777 {
		err = unix.Fchmodat(in.Fd(), name, want.Mode&0o7777, 0)
	}
	return wrap("set the owner and mode of", path, err)
}
