package dir

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxDepth bounds how many handles RemoveTree and Walk hold, so that a tenant's tower of
// directories costs no descriptors. RemoveTree first moves up what lies deeper.
const maxDepth = 64

// RemoveTree removes name and all below it. It never follows a link and never
// enters another filesystem: a mount below is an error, and what it carries stays.
// What cannot be removed does not keep the rest; the first such error is returned.
// Each call of pause comes before one removal; an error from it, or the end of
// ctx, stops the work, which a later call takes up again. A missing name is no error.
//
// Directories from great depth pass through the tree's own root, since a quota may
// let them no farther, or through that of the subvolume of btrfs that they lie in.
func (d *Dir) RemoveTree(ctx context.Context, name string, pause func(context.Context) error) error {
	r := remover{pause: pause}
	return r.remove(ctx, place{dir: d}, name)
}

type remover struct {
	top   *home // of the whole tree
	pause func(context.Context) error
	moved int
}

// A home takes in directories that lie too deep: the tree's root, or that of a subvolume
// in it. From one subvolume to another only subvolumes can be moved (rename(2), EXDEV).
type home struct {
	root    *Dir
	pending []string // names in root still to be removed
}

// A place is a directory that is being emptied.
type place struct {
	dir   *Dir
	depth int
	home  *home
}

// emptyHome empties the root of the tree or of a subvolume, and what was moved up to it
// meanwhile.
func (r *remover) emptyHome(ctx context.Context, root *Dir, depth int) error {
	h := &home{root: root}
	if r.top == nil {
		r.top = h
	}
	at := place{dir: root, depth: depth, home: h}
	first := r.empty(ctx, at)
	for len(h.pending) > 0 && ctx.Err() == nil {
		next := h.pending[0]
		h.pending = h.pending[1:]
		if err := r.remove(ctx, at, next); first == nil {
			first = err
		}
	}
	return errors.Join(first, ctx.Err())
}

// remove removes an entry: a file at once, a directory after what it holds.
func (r *remover) remove(ctx context.Context, in place, name string) error {
	if err := r.pause(ctx); err != nil {
		return err
	}
	err := in.dir.Remove(name)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	// unlinkat(2) answers EISDIR for a directory, and EPERM on filesystems that
	// keep to POSIX; EPERM is also the answer for an immutable file.
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return err
	}
	sub, openErr := in.dir.OpenInside(name)
	if errors.Is(openErr, ErrNotDirectory) {
		return err
	}
	if openErr != nil {
		return openErr
	}
	moved, err := r.clear(ctx, in, name, sub)
	if closeErr := sub.Close(); err == nil {
		err = closeErr
	}
	if err != nil || moved {
		return err
	}
	return ignoreNotExist(in.dir.RemoveDir(name))
}

// clear empties a directory, or moves it up. A subvolume has to have room below it before
// maxDepth, or what lies there could not be moved up within it: from the lower half it goes
// to the top.
func (r *remover) clear(ctx context.Context, in place, name string, sub *Dir) (moved bool, err error) {
	isSubvolume, err := makeWritable(sub)
	switch {
	case err != nil:
		return false, err
	case isSubvolume && in.depth > maxDepth/2:
		return true, r.moveUp(in.dir, name, r.top)
	case in.depth >= maxDepth:
		return true, r.moveUp(in.dir, name, in.home)
	case isSubvolume || in.depth == 0:
		return false, r.emptyHome(ctx, sub, in.depth+1)
	}
	return false, r.empty(ctx, place{dir: sub, depth: in.depth + 1, home: in.home})
}

func (r *remover) empty(ctx context.Context, at place) error {
	var first error
	for entry, err := range at.dir.Entries() {
		if err == nil {
			err = r.remove(ctx, at, entry.Name)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if first == nil {
			first = err
		}
	}
	return first
}

// moveUp puts a directory beside the top of the tree or subvolume, to be removed from there.
func (r *remover) moveUp(d *Dir, name string, to *home) error {
	up, err := r.rename(d, name, to.root)
	if errors.Is(err, unix.EXDEV) && acceptAllProjects(to.root) == nil {
		up, err = r.rename(d, name, to.root)
	}
	if err == nil {
		to.pending = append(to.pending, up)
	}
	return err
}

func (r *remover) rename(d *Dir, name string, to *Dir) (up string, err error) {
	for {
		up = fmt.Sprintf("%sdeep-%d", tempPrefix, r.moved)
		r.moved++
		err = d.Rename(name, to, up)
		if !errors.Is(err, fs.ErrExist) { // left by an earlier removal that was stopped
			return up, err
		}
	}
}

// Of linux/btrfs.h and linux/btrfs_tree.h: BTRFS_IOC_SUBVOL_GETFLAGS and _SETFLAGS, put
// together as in asm-generic/ioctl.h, BTRFS_SUBVOL_RDONLY, and the inode number of the
// root of every subvolume.
const (
	subvolumeGetFlags = 2<<30 | 8<<16 | 0x94<<8 | 25
	subvolumeSetFlags = 1<<30 | 8<<16 | 0x94<<8 | 26
	subvolumeReadOnly = 2
	subvolumeRoot     = 256
)

// makeWritable takes the read-only flag off a subvolume of btrfs, which the user of a
// volume can make, as a snapshot, and which could be neither emptied nor moved otherwise.
// It tells whether the directory is the root of a subvolume at all.
func makeWritable(d *Dir) (isSubvolume bool, err error) {
	id, err := d.ID()
	if err != nil || id.Ino != subvolumeRoot {
		return false, err
	}
	var flags uint64
	if ioctl(d, subvolumeGetFlags, unsafe.Pointer(&flags)) != nil {
		return false, nil //nolint:nilerr // not btrfs
	}
	if flags&subvolumeReadOnly == 0 {
		return true, nil
	}
	flags &^= subvolumeReadOnly
	if err := ioctl(d, subvolumeSetFlags, unsafe.Pointer(&flags)); err != nil {
		return true, pathError("make the subvolume writable", d.path, err)
	}
	return true, nil
}

// fileAttr is struct fsxattr of linux/fs.h as far as it matters here.
type fileAttr struct {
	Flags uint32
	_     [24]byte
}

const (
	fsGetXattr     = 2<<30 | unsafe.Sizeof(fileAttr{})<<16 | 'X'<<8 | 31 // FS_IOC_FSGETXATTR
	fsSetXattr     = 1<<30 | unsafe.Sizeof(fileAttr{})<<16 | 'X'<<8 | 32 // FS_IOC_FSSETXATTR
	projectInherit = 0x200                                               // FS_XFLAG_PROJINHERIT
	hasAttr        = 0x80000000                                          // FS_XFLAG_HASATTR, which can only be read
)

// acceptAllProjects takes the flag off a directory of XFS or ext4 that keeps directories
// of other projects from being moved there. Its own project stays.
func acceptAllProjects(d *Dir) error {
	var attr fileAttr
	if err := ioctl(d, fsGetXattr, unsafe.Pointer(&attr)); err != nil {
		return err
	}
	attr.Flags &^= projectInherit | hasAttr
	return ioctl(d, fsSetXattr, unsafe.Pointer(&attr))
}

func ioctl(d *Dir, request uintptr, arg unsafe.Pointer) error {
	fd, err := d.ReadFd()
	if err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}
