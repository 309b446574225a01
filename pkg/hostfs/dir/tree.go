package dir

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxDepth bounds how many handles RemoveTree holds. A directory that lies deeper
// is first moved up, so that a tenant's tower of directories costs no descriptors.
const maxDepth = 64

// RemoveTree removes name and all below it. It never follows a link and never
// enters another filesystem: a mount below is an error, and what it carries stays.
// What cannot be removed does not keep the rest; the first such error is returned.
// Each call of pause comes before one removal; an error from it, or the end of
// ctx, stops the work, which a later call takes up again. A missing name is no error.
//
// Directories from great depth pass through the tree's own root, since a quota may
// let them no farther.
func (d *Dir) RemoveTree(ctx context.Context, name string, pause func(context.Context) error) error {
	r := remover{pause: pause}
	return r.remove(ctx, d, name, 0)
}

type remover struct {
	top     *Dir // the tree's root
	pause   func(context.Context) error
	pending []string // names in top still to be removed
	moved   int
}

// emptyTop empties the tree's root, and what was moved up to it meanwhile.
func (r *remover) emptyTop(ctx context.Context, d *Dir) error {
	r.top = d
	first := r.empty(ctx, d, 1)
	for len(r.pending) > 0 && ctx.Err() == nil {
		next := r.pending[0]
		r.pending = r.pending[1:]
		if err := r.remove(ctx, d, next, 1); first == nil {
			first = err
		}
	}
	return errors.Join(first, ctx.Err())
}

// remove removes an entry: a file at once, a directory after what it holds.
func (r *remover) remove(ctx context.Context, parent *Dir, name string, depth int) error {
	if err := r.pause(ctx); err != nil {
		return err
	}
	err := parent.Remove(name)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	// unlinkat(2) answers EISDIR for a directory, and EPERM on filesystems that
	// keep to POSIX; EPERM is also the answer for an immutable file.
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return err
	}
	sub, openErr := parent.OpenInside(name)
	if errors.Is(openErr, ErrNotDirectory) {
		return err
	}
	if openErr != nil {
		return openErr
	}
	if err := makeWritable(sub); err != nil {
		return errors.Join(err, sub.Close())
	}
	if depth == 0 {
		err = r.emptyTop(ctx, sub)
	} else {
		err = r.empty(ctx, sub, depth+1)
	}
	if closeErr := sub.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	return ignoreNotExist(parent.RemoveDir(name))
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
// volume can make, as a snapshot, and which could not be emptied otherwise.
func makeWritable(d *Dir) error {
	id, err := d.ID()
	if err != nil || id.Ino != subvolumeRoot {
		return err
	}
	var flags uint64
	// Where the filesystem is not btrfs, it stays 0.
	_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(d.Fd()), subvolumeGetFlags, uintptr(unsafe.Pointer(&flags)))
	if flags&subvolumeReadOnly == 0 {
		return nil
	}
	flags &^= subvolumeReadOnly
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(d.Fd()), subvolumeSetFlags, uintptr(unsafe.Pointer(&flags))); errno != 0 {
		return pathError("make the subvolume writable", d.path, errno)
	}
	return nil
}

func (r *remover) empty(ctx context.Context, d *Dir, depth int) error {
	var first error
	for entry, err := range d.Entries() {
		if err == nil && depth >= maxDepth && entry.IsDir {
			err = r.moveUp(d, entry.Name)
		} else if err == nil {
			err = r.remove(ctx, d, entry.Name, depth)
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

// moveUp puts a directory beside the top of the tree, to be removed from there.
func (r *remover) moveUp(d *Dir, name string) error {
	for {
		up := fmt.Sprintf("%sdeep-%d", tempPrefix, r.moved)
		r.moved++
		err := d.Rename(name, r.top, up)
		if errors.Is(err, fs.ErrExist) {
			continue // left by an earlier removal that was stopped
		}
		if err == nil {
			r.pending = append(r.pending, up)
		}
		return err
	}
}
