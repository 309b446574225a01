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
	In *View
	// UnlessBusy does something about a volume, unless a call works on it, here or on another
	// node: then it is left to that. The zero id stands for something that is about no volume.
	UnlessBusy func(id volume.ID, do func() error) error
}

// throw moves an entry that is no volume into the trash, where the reaper erases it. The ledger keeps its promise until then. If
// the filesystem has no room for its name in the trash, the entry is erased where it is, until there is room or nothing of it is
// left. No client counts on it: the call that was making it got no answer, or a call has removed it.
func (p *Leftovers) throw(from *dir.Dir, name string, as store.TrashName) error {
	for {
		err := p.In.Store.Trash().Throw(from, name, as.String())
		if err == nil {
			p.In.Ledger.Trash().Throw(as.String(), as.Promised)
		}
		if !store.NoRoom(err) {
			return err
		}
		if more, err := p.eraseThere(from, name, as.UID); !more || !errors.Is(err, context.Canceled) {
			return err
		}
	}
}

// DiscardCreation gives an entry of the directory of creating/ to the reaper.
func (p *Leftovers) DiscardCreation(name string) error {
	err := p.throwCreation(p.In.Store.Creating().Dir(), name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// UndoCreation undoes a creation of this node, the record first: what is in creating/
// is the sign that there is something to undo.
func (p *Leftovers) UndoCreation(id volume.ID) error {
	if err := p.In.Store.Records().Undo(id); err != nil {
		return err
	}
	return p.DiscardCreation(id.String())
}

// NoneLeft returns ErrBusy until nothing is left of attempts to make an entry that failed, and ErrPrecondition if that
// cannot be erased: so a copy that fails each time holds the space of one, however fast it is tried again. The caller has
// the lock of the id.
func (p *Leftovers) NoneLeft(id volume.ID) error {
	creating := p.In.Store.Creating().Dir()
	if there, err := creating.Exists(id.String()); err != nil {
		return err
	} else if there {
		if err := p.throwCreation(creating, id.String()); err != nil {
			return err
		}
	}
	for _, name := range p.In.Ledger.Trash().Names(true) {
		if store.ParseTrashName(name).Of != id.String() {
			continue
		}
		left, failed := p.In.Ledger.Trash().Left(name)
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

// throwCreation moves an entry of a directory of creating/ into the trash. The entry may carry a project id: the name in the
// trash has the uid that claimed it, so that the reaper can release it.
func (p *Leftovers) throwCreation(creating *dir.Dir, name string) error {
	carried, err := p.In.Enforcer.IDs.In(creating, name)
	if err != nil {
		return err
	}
	suffix := p.In.Enforcer.IDs.Claims.Owner(carried)
	if suffix == "" {
		suffix = store.RandomSuffix()
	}
	bytes, err := p.creationBytes(creating, name, carried)
	if err != nil {
		return err
	}
	return p.throw(creating, name, store.TrashName{Of: name, UID: suffix, Promised: bytes})
}

// creationBytes is what an entry of a directory of creating/ occupies: a directory volume
// nothing yet, unless it is a copy; a file up to all of its size.
func (p *Leftovers) creationBytes(creating *dir.Dir, name string, carried quota.ID) (int64, error) {
	empty, err := store.IsEmpty(creating, name)
	if err != nil || empty {
		return 0, err
	}
	return p.In.Usage().HeldBy(creating, name, carried), nil
}

// ReleaseLost gives back the id of a lost volume that was deleted. Should its directory be somewhere else, that
// keeps the id, which is then not given again.
func (p *Leftovers) ReleaseLost(id volume.ID, e store.Entry) {
	c := InfoOf(e)
	if !p.In.Enforcer.Enforces(c) {
		return
	}
	if err := p.In.Enforcer.IDs.Release(p.In.Store.Root(), c.QuotaID()); err != nil {
		p.In.Log.Error(err, "The limit of a deleted volume is still there", "volume", id.String())
	}
}

// ReleaseUnused removes limits that no directory has.
func (p *Leftovers) ReleaseUnused() {
	released, err := p.In.Enforcer.IDs.ReleaseUnused(p.In.Store.Root(), func() { p.In.Step() })
	if err != nil {
		p.In.Log.Error(err, "Failed to remove limits that no directory has")
	}
	if released > 0 {
		p.In.Log.Info("Removed limits that no directory has", "limits", released)
	}
}
