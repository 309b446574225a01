package bind

import (
	"errors"
	"io/fs"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Root is a directory in which targets may be searched for: what it is, and where. The zero Root
// is none.
type Root struct {
	ID dir.ID
	At Place
}

// Within is the index of the directory that the target is, or lies in, whatever path leads
// there, also through a mount of something inside it; -1 for none, and where the target's parent is
// missing. MountRoot is that of the mounts. What a filesystem holds that is mounted inside one of the
// directories does not count.
func (t Target) Within(in []Root, mountRoot func(*dir.Dir) (Place, error)) (int, error) {
	roots := make([]dir.ID, len(in))
	for i, root := range in {
		roots[i] = root.ID
	}
	parent, done, err := t.openParent()
	if errors.Is(err, ErrTarget) {
		return -1, nil
	}
	if err != nil {
		return -1, err
	}
	defer done()
	// What is missing there, or dead, is none of the directories.
	if own, err := standingAt(parent, t.base()); err == nil {
		if i := slices.Index(roots, own.id); i >= 0 {
			return i, nil
		}
	}
	if i, shares, err := ancestorOf(parent, roots); i >= 0 || !shares || err != nil {
		return i, err
	}
	// From a mount of a directory inside a root ".." leads to where that is mounted. All that is above the parent in
	// its mount was compared: what is left is where that mount begins.
	begins, err := mountRoot(parent)
	if err != nil {
		return -1, err
	}
	return slices.IndexFunc(in, func(root Root) bool { return begins.in(root.At) }), nil
}

// ancestorOf is the index of the directory that d is or lies in; -1 for none. It reports whether d can be on the
// filesystem of one of them.
func ancestorOf(d *dir.Dir, roots []dir.ID) (i int, shares bool, err error) {
	var below standing
	// PATH_MAX bounds the paths that the kernel takes, and so how far up one can go.
	for up := "."; len(up) < unix.PathMax-len("/.."); up += "/.." {
		at, err := standingAt(d, up)
		if err != nil {
			return -1, shares, &fs.PathError{Op: "stat", Path: path.Join(d.String(), up), Err: err}
		}
		if i := slices.Index(roots, at.id); i >= 0 {
			return i, true, nil
		}
		if up == "." {
			shares = sharesDevice(roots, at.id)
		}
		// The root of the namespace is its own parent.
		if at == below || !shares {
			break
		}
		below = at
	}
	return -1, shares, nil
}

// A standing is a directory as it is seen through a mount.
type standing struct {
	id    dir.ID
	mount uint64
}

func standingAt(d *dir.Dir, name string) (standing, error) {
	var st unix.Statx_t
	// Cached attributes suffice, and a filesystem that hangs must not be asked.
	err := unix.Statx(d.Fd(), name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, unix.STATX_INO|unix.STATX_MNT_ID, &st)
	return standing{dir.ID{Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Ino: st.Ino}, st.Mnt_id}, err
}

// sharesDevice reports whether a directory can be on the filesystem of one of the roots. The
// subvolumes of a btrfs have numbers of their own, from those that belong to no device (major 0).
func sharesDevice(roots []dir.ID, id dir.ID) bool {
	for _, root := range roots {
		if root.Dev == id.Dev || unix.Major(root.Dev) == 0 && unix.Major(id.Dev) == 0 {
			return true
		}
	}
	return false
}
