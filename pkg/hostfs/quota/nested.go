package quota

import (
	"errors"
	"fmt"
	"math"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// ErrNested reports a subvolume of btrfs in which others are left.
var ErrNested = errors.New("more subvolumes lie in it than are removed at once")

// Free takes the limits off a subvolume that is being removed, or copied where no limit is kept up. A user who made it may have given it limits,
// and the kernel keeps them as long as there are quotas of any kind. In is a directory of its filesystem; one of another, as of a mount, is
// refused. Elsewhere than on btrfs it does nothing, nor without CAP_SYS_ADMIN.
func Free(in, d *dir.Dir) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(d.Fd(), &st); err != nil {
		return fmt.Errorf("find the kind of filesystem of %s: %w", d, err)
	}
	if uint32(st.Type) != unix.BTRFS_SUPER_MAGIC {
		return nil
	}
	id, err := (*subvolumes)(nil).IDOf(d)
	if err != nil || id == 0 {
		return err
	}
	here, hereErr := dir.SpaceIDOf(in)
	there, thereErr := dir.SpaceIDOf(d)
	if err := errors.Join(hereErr, thereErr); err != nil {
		return err
	}
	if here != there {
		return fmt.Errorf("take the limits off subvolume %d in %s: %w: %s is on another filesystem", id, in, unix.EXDEV, d)
	}
	return free(in, id)
}

// groups begins the ids of the qgroups by which an earlier version limited subvolumes with simple quotas: level 1, and "HP".
const groups = ID(1)<<48 | 0x4850<<32

// free is Free for the subvolume of an id.
func free(in *dir.Dir, id ID) error {
	for _, limited := range []ID{id, groups | id} {
		switch err := setLimit(in, limited, 0); {
		case err == nil, errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTCONN): // there is no such qgroup, or quotas were disabled
		case errors.Is(err, unix.EPERM): // this process may take none off, and perhaps remove the subvolume all the same
			return nil
		default:
			return fmt.Errorf("take the limits off subvolume %d in %s: %w", id, in, err)
		}
	}
	return nil
}

// atOnce is how many subvolumes RemoveNested removes.
const atOnce = 1000

// RemoveNested removes the subvolumes that lie in d, at whatever depth, with their content, as dir.RemoveSubvolume does: also where the
// filesystem is full. Of very many it removes some, and returns ErrNested. Other directories have none.
func RemoveNested(d *dir.Dir) error {
	own, err := (*subvolumes)(nil).IDOf(d)
	if err != nil || own == 0 {
		return err
	}
	for at, left := own, atOnce; ; {
		inside, err := neighbour(d, at, rootRef, 0)
		switch {
		case err != nil:
			return fmt.Errorf("find the subvolumes in %s: %w", d, err)
		case inside != 0:
			if err := free(d, at); err != nil { // which the removal of one in it is charged to
				return err
			}
			at = inside
			continue
		case at == own:
			return nil
		case left == 0:
			return fmt.Errorf("remove the subvolumes in %s: %w", d, ErrNested)
		}
		above, err := neighbour(d, at, rootBackref, 0)
		if err == nil {
			err = ioctl.Do(d, destroyByID, &byID{Flags: isByID, ID: uint64(at)})
		}
		if err != nil {
			return fmt.Errorf("remove subvolume %d in %s: %w", at, d, err)
		}
		at, left = above, left-1
	}
}

// neighbour is the first subvolume, from an id on, that one has a reference of a kind to, or 0.
func neighbour(d *dir.Dir, of ID, kind uint32, from ID) (ID, error) {
	found, err := search(d, ioctl.SearchKey{
		Tree:      rootTree,
		MinObject: uint64(of), MaxObject: uint64(of),
		MinType: kind, MaxType: kind,
		MinOffset: uint64(from), MaxOffset: math.MaxUint64,
	})
	if found == nil || err != nil {
		return 0, err
	}
	return ID(found.Header.Offset), nil
}
