package reconcile

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Leftovers are those of a pool whose directories of this node are open: see store.OpenWork.
type Leftovers struct {
	*Pool
	// UnlessBusy does something about a volume, unless a call works on it, here or on another
	// node: then it is left to that. The zero id stands for something that is about no volume.
	UnlessBusy func(id volume.ID, do func() error) error
	// Thrown is called with what was put into the trash, and Wake when trash was found.
	Thrown func(name string)
	Wake   func()
}

// throw moves an entry that is no volume into the trash, where the reaper removes
// it. The ledger keeps its promise until then. Without room for its name there it erases the entry
// where it is, until there is room or nothing is left: no call that made it was answered, or one that removed it was, and it may be
// what takes the room.
func (p *Leftovers) throw(from *dir.Dir, name string, as store.Thrown) error {
	for {
		err := p.Store.Trash().Throw(from, name, as.String())
		if err == nil {
			p.Thrown(as.String())
		}
		if !store.NoRoom(err) {
			return err
		}
		if over, err := p.eraseThere(from, name, as.UID); !over || !errors.Is(err, context.Canceled) {
			return err
		}
	}
}

// DiscardCreation gives an entry of the directory of creating/ to the reaper.
func (p *Leftovers) DiscardCreation(name string) error {
	err := p.throwCreation(p.Store.Creating().Dir(), name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// NoneLeft returns ErrBusy until nothing is left of attempts to make an entry that failed, and ErrPrecondition if that
// cannot be erased: so a copy that fails each time holds the space of one, however fast it is tried again. The caller has
// the lock of the id.
func (p *Leftovers) NoneLeft(id volume.ID) error {
	creating := p.Store.Creating().Dir()
	if there, err := creating.Exists(id.String()); err != nil {
		return err
	} else if there {
		if err := p.throwCreation(creating, id.String()); err != nil {
			return err
		}
	}
	for _, name := range p.Ledger.Trash().Names(true) {
		if store.ParseThrown(name).Of != id.String() {
			continue
		}
		left, failed := p.Ledger.Trash().Left(name)
		switch {
		case !left:
		case failed != nil:
			return fmt.Errorf("%w: what an earlier attempt to make %s has left cannot be erased, and another copy would take as much space again: %s in the trash: %w",
				volume.ErrPrecondition, id.Named(), name, failed)
		default:
			return fmt.Errorf("%w: what an earlier attempt to make %s has left is being erased: %s in the trash", volume.ErrBusy, id.Named(), name)
		}
	}
	return nil
}

// throwCreation throws an entry of a directory of creating/ away. The name in the trash
// says whose the id is that it carries, so that the reaper gives it back.
func (p *Leftovers) throwCreation(creating *dir.Dir, name string) error {
	carried, err := p.Keeper.IDs.In(creating, name)
	if err != nil {
		return err
	}
	suffix := p.Keeper.IDs.Claims.Owner(carried)
	if suffix == "" {
		suffix = store.RandomSuffix()
	}
	bytes, err := p.creationBytes(creating, name, carried)
	if err != nil {
		return err
	}
	return p.throw(creating, name, store.Thrown{Of: name, UID: suffix, Promised: bytes})
}

// creationBytes is what an entry of a directory of creating/ occupies: a directory volume
// nothing yet, unless it is a copy; a file up to all of its size.
func (p *Leftovers) creationBytes(creating *dir.Dir, name string, carried quota.ID) (int64, error) {
	empty, err := store.IsEmpty(creating, name)
	if err != nil || empty {
		return 0, err
	}
	return p.Usage().HeldBy(creating, name, carried), nil
}
