package quota

import (
	"errors"
	"fmt"
	"math"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// ErrNested reports a subvolume of btrfs in which others are left.
var ErrNested = errors.New("more subvolumes lie in it than are removed at once")

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
