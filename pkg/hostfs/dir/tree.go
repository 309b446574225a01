package dir

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"strconv"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// maxDepth bounds the handles that RemoveTree and Walk hold, however deep a tenant nests
// directories. RemoveTree moves deeper directories up before it removes them, and walks those that cannot be moved.
const maxDepth = 64

// RemoveTree removes name and everything below it. It never follows a link and never
// enters another filesystem: a mount below is an error, and its content stays. An entry
// that cannot be removed does not stop the rest; the first such error is returned, also if ctx ends then.
// pause is called before each removal, and its error is that of the entry; the end of ctx stops the
// removal, and a later call continues it. A missing name is not an error.
// Flags that keep an entry from being removed are taken off: see Unprotect.
//
// Deep directories are moved to the root of the tree, since a project quota may not allow
// them outside, or to the root of their btrfs subvolume. Those that cannot be moved are emptied by a walk, which remembers some
// 60 bytes of each directory above: a user may have encrypted them and taken the key away (ENOKEY), and the filesystem may be full.
func RemoveTree(ctx context.Context, d *Dir, name string, pause func(context.Context) error) error {
	return RemoveTreeFreeing(ctx, d, name, pause, func(_, _ *Dir) error { return nil })
}

// RemoveTreeFreeing is RemoveTree that calls free for each subvolume of btrfs, with the directory that it is in, before it changes
// either: who made it may have given it limits, under which it could neither be made writable nor emptied.
func RemoveTreeFreeing(ctx context.Context, d *Dir, name string, pause func(context.Context) error, free func(in, subvolume *Dir) error) error {
	r := remover{pause: pause, free: free, moved: tempPrefix + "deep-" + rand.Text() + "-"}
	err := r.remove(ctx, place{dir: d}, name)
	return cmp.Or(r.failed, err)
}

type remover struct {
	top   *home // of the whole tree
	pause func(context.Context) error
	free  func(in, subvolume *Dir) error
	// moved begins the names of directories that were moved up, before their number. It is another one each time: none that an
	// interrupted removal has given is in the way.
	moved string
	// failed is why the first entry that stays could not be removed.
	failed error
}

// A home is where deep directories are moved: the root of the tree, or of a subvolume in it.
// Only subvolumes can be moved from one subvolume to another (rename(2), EXDEV).
type home struct {
	root *Dir
	// removed is how many of those that were moved there are removed again. Their names would not fit into memory.
	moved, removed int
}

// A place is a directory that is being emptied.
type place struct {
	dir   *Dir
	depth int
	home  *home
}

// emptyHome empties the root of the tree or of a subvolume, then the directories that were
// moved there.
func (r *remover) emptyHome(ctx context.Context, root *Dir, depth int) error {
	h := &home{root: root}
	if r.top == nil {
		r.top = h
	}
	at := place{dir: root, depth: depth, home: h}
	first := r.empty(ctx, at)
	for h.removed < h.moved && ctx.Err() == nil {
		h.removed++
		if err := r.remove(ctx, at, r.name(h.removed)); first == nil {
			first = err
		}
	}
	return errors.Join(first, ctx.Err())
}

// remove removes an entry: a file at once, a directory after its content.
func (r *remover) remove(ctx context.Context, in place, name string) error {
	err := r.removeEntry(ctx, in, name)
	r.note(ctx, err)
	return err
}

// note keeps the first error, unless the removal was stopped.
func (r *remover) note(ctx context.Context, err error) {
	if err != nil && ctx.Err() == nil && r.failed == nil {
		r.failed = err
	}
}

func (r *remover) removeEntry(ctx context.Context, in place, name string) error {
	err := r.unlink(ctx, in.dir, name)
	// unlinkat(2) fails with EISDIR for a directory, or with EPERM on filesystems that
	// follow POSIX.
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

// unlink removes an entry other than a directory.
func (r *remover) unlink(ctx context.Context, in *Dir, name string) error {
	if err := r.pause(ctx); err != nil {
		return err
	}
	err := in.Remove(name)
	if errors.Is(err, unix.EPERM) {
		err = removeProtected(in, name, err)
	}
	return ignoreNotExist(err)
}

// clear empties a directory, or moves it up. Directories in a subvolume can only be moved up
// within it, so a subvolume must not start close to maxDepth: one in the lower half is moved
// to the top.
func (r *remover) clear(ctx context.Context, in place, name string, sub *Dir) (moved bool, err error) {
	isSubvolume, err := r.makeWritable(in.dir, sub)
	switch {
	case err != nil:
		return false, err
	case isSubvolume && in.depth > maxDepth/2:
		return r.moveUp(ctx, in, name, sub, r.top)
	case in.depth >= maxDepth:
		return r.moveUp(ctx, in, name, sub, in.home)
	case isSubvolume || in.depth == 0:
		return false, r.emptyHome(ctx, sub, in.depth+1)
	}
	return false, r.empty(ctx, place{dir: sub, depth: in.depth + 1, home: in.home})
}

// makeWritable frees a directory that is a subvolume and clears its read-only flag, which needs room in it.
func (r *remover) makeWritable(in, d *Dir) (isSubvolume bool, err error) {
	id, err := d.ID()
	if err == nil && id.Ino == ioctl.SubvolumeRoot {
		err = r.free(in, d)
	}
	if err != nil {
		return false, err
	}
	isSubvolume, _, err = makeWritable(d)
	return isSubvolume, err
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

// moveUp moves a directory to the root of the tree or subvolume, which then removes it. One that cannot be moved it empties.
func (r *remover) moveUp(ctx context.Context, in place, name string, sub *Dir, to *home) (moved bool, err error) {
	up := r.name(to.moved + 1)
	err = in.dir.Rename(name, to.root, up)
	if errors.Is(err, unix.EXDEV) && acceptAllProjects(to.root) == nil {
		err = in.dir.Rename(name, to.root, up)
	}
	if err == nil {
		to.moved++
		return true, nil
	}
	return false, Visit(sub, &emptier{r: r, ctx: ctx})
}

// An emptier is a Visitor that removes what it visits. It stops only at the end of its context.
type emptier struct {
	r   *remover
	ctx context.Context
	// above are the directories that hold those being visited. The names of those far above are found again, since all of them would
	// not fit into memory.
	above []held
}

// A held directory is in another one by a name.
type held struct {
	in   ID
	name string
}

// File removes an entry.
func (e *emptier) File(in *Dir, name string) error {
	e.r.note(e.ctx, e.r.unlink(e.ctx, in, name))
	return e.ctx.Err()
}

// Enter takes off a directory what keeps its entries and itself from being removed.
func (e *emptier) Enter(d, in *Dir, name string) error {
	id, err := in.ID()
	if err != nil {
		return err
	}
	e.above = append(e.above, held{id, name})
	if far := len(e.above) - maxDepth; far > 0 {
		e.above[far-1].name = ""
	}
	if _, err = e.r.makeWritable(in, d); err == nil {
		_, err = unprotect(d, d.path)
	}
	e.r.note(e.ctx, err)
	return e.ctx.Err()
}

// Leave removes a directory.
func (e *emptier) Leave(d *Dir) error {
	last := len(e.above) - 1
	at := e.above[last]
	e.above = e.above[:last]
	in, err := Parent(d, at.in)
	if err != nil {
		return err
	}
	if at.name == "" {
		at.name, err = nameIn(in, d)
	}
	if err == nil {
		err = e.r.pause(e.ctx)
	}
	if err == nil {
		err = ignoreNotExist(in.RemoveDir(at.name))
	}
	e.r.note(e.ctx, err)
	return errors.Join(e.ctx.Err(), in.Close())
}

// nameIn is the name of a directory that lies in d.
func nameIn(d *Dir, sub *Dir) (string, error) {
	id, err := sub.ID()
	if err != nil {
		return "", err
	}
	for entry, err := range d.Entries() {
		if err != nil {
			return "", err
		}
		var st unix.Stat_t
		if entry.IsDir && unix.Fstatat(d.fd, entry.Name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && id == (ID{Dev: st.Dev, Ino: st.Ino}) {
			return entry.Name, nil
		}
	}
	return "", d.pathError("find", "a directory", fs.ErrNotExist)
}

// name is that of a directory that was moved up, by its number among those of a home.
func (r *remover) name(number int) string { return r.moved + strconv.Itoa(number) }

// Of linux/btrfs.h: BTRFS_IOC_SUBVOL_GETFLAGS and _SETFLAGS, and BTRFS_SUBVOL_RDONLY.
const (
	subvolumeGetFlags = ioctl.Read | 8<<ioctl.Size | ioctl.Btrfs | 25
	subvolumeSetFlags = ioctl.Write | 8<<ioctl.Size | ioctl.Btrfs | 26
	subvolumeReadOnly = 2
)

// makeWritable clears the read-only flag of a btrfs subvolume, which otherwise could be
// neither emptied nor moved. The user of a volume can create such a subvolume, as a snapshot, and
// can set the flag of the subvolume that is the volume. It reports whether the directory is the root of a subvolume,
// and whether that was read-only.
func makeWritable(d *Dir) (isSubvolume, changed bool, err error) {
	id, err := d.ID()
	if err != nil || id.Ino != ioctl.SubvolumeRoot {
		return false, false, err
	}
	var flags uint64
	if ioctl.Do(d, subvolumeGetFlags, &flags) != nil {
		return false, false, nil //nolint:nilerr // not btrfs
	}
	if flags&subvolumeReadOnly == 0 {
		return true, false, nil
	}
	flags &^= subvolumeReadOnly
	if err := ioctl.Do(d, subvolumeSetFlags, &flags); err != nil {
		return true, false, pathError("make the subvolume writable", d.path, err)
	}
	return true, true, nil
}

// RemoveSubvolume removes a subvolume of btrfs from d with all that is in it, in one step, which the kernel's own reserve pays for where the
// filesystem is full. The kernel frees the blocks later. It fails if another subvolume is inside, or if it is none.
func RemoveSubvolume(d *Dir, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	var args ioctl.Named
	copy(args.Name[:len(args.Name)-1], name)
	if err := ioctl.Do(d, ioctl.DestroySubvolume, &args); err != nil {
		return d.pathError("remove the subvolume", name, err)
	}
	return nil
}

// acceptAllProjects clears the flag (FS_XFLAG_PROJINHERIT) of a directory on XFS or ext4 that
// keeps directories of other projects from being moved into it. Its own project id stays.
func acceptAllProjects(d *Dir) error {
	var attr ioctl.FileAttr
	if err := ioctl.Do(d, ioctl.GetFileAttr, &attr); err != nil {
		return err
	}
	attr.Flags &^= ioctl.ProjectInherit | ioctl.HasAttr
	return ioctl.Do(d, ioctl.SetFileAttr, &attr)
}
