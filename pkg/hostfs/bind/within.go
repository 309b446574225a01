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
// missing. MountRoot is that of the mounts. What is mounted inside one of the directories from elsewhere does not count.
func (t Target) Within(in []Root, mountRoot func(*dir.Dir, MountID) (Place, error)) (int, error) {
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
	at, err := standingAt(parent, ".")
	if err != nil {
		return -1, &fs.PathError{Op: "stat", Path: parent.String(), Err: err}
	}
	if i := slices.Index(roots, at.id); i >= 0 || !sharesDevice(roots, at.id) {
		return i, nil
	}
	if i, err := above(parent, at, roots); i >= 0 || err != nil {
		return i, err
	}
	// All that is above the parent in its mount was compared: what is left is where that mount begins.
	begins, err := mountRoot(parent, at.mount)
	if err != nil {
		return -1, err
	}
	return slices.IndexFunc(in, func(root Root) bool { return begins.in(root.At) }), nil
}

// above is the index of the directory that d lies in, as far as the mount goes that d is reached through; -1 for none.
func above(d *dir.Dir, at standing, roots []dir.ID) (int, error) {
	// PATH_MAX bounds the paths that the kernel takes, and so how far up one can go.
	for up := ".."; !at.mountRoot && len(up) < unix.PathMax-len("/.."); up += "/.." {
		below := at
		var err error
		if at, err = standingAt(d, up); err != nil {
			return -1, &fs.PathError{Op: "stat", Path: path.Join(d.String(), up), Err: err}
		}
		if at == below { // the root of the namespace is its own parent
			break
		}
		if i := slices.Index(roots, at.id); i >= 0 {
			return i, nil
		}
	}
	return -1, nil
}

// A standing is a directory as it is seen through a mount.
type standing struct {
	id        dir.ID
	mount     MountID
	mountRoot bool // the mount begins with it (STATX_ATTR_MOUNT_ROOT, Linux 5.8)
}

func standingAt(d *dir.Dir, name string) (standing, error) {
	var st unix.Statx_t
	// Cached attributes suffice, and a filesystem that hangs must not be asked.
	err := unix.Statx(d.Fd(), name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, unix.STATX_INO|statxMountUnique, &st)
	return standing{
		id:        dir.ID{Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Ino: st.Ino},
		mount:     MountID{number: st.Mnt_id, unique: st.Mask&statxMountUnique != 0},
		mountRoot: st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0,
	}, err
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
