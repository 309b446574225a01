package reconcile

import (
	"errors"
	"path"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// RecoverRecords removes records that were being written.
func (p *Leftovers) RecoverRecords() error {
	for t, err := range p.In.Store.Records().Unwritten() {
		if err != nil {
			return err
		}
		p.In.Left(t.String(), p.UnlessBusy(t.Of, func() error { return p.In.Store.Records().RemoveUnwritten(t) }))
	}
	return nil
}

// RecoverCreations undoes the creations that a directory of creating/ has: none of them was
// answered.
func (p *Leftovers) RecoverCreations(creating *dir.Dir) error {
	names, err := store.Names(creating)
	if err != nil {
		return err
	}
	for _, name := range names {
		p.In.Step()
		p.In.Left(path.Join(creating.String(), name), p.recoverCreation(creating, name))
	}
	return nil
}

func (p *Leftovers) recoverCreation(creating *dir.Dir, name string) error {
	undo := func() error {
		// The call that was making it may have ended since the names were read.
		if exists, err := creating.Exists(name); err != nil || !exists {
			return err
		}
		err := p.undoNamed(creating, name)
		if err == nil {
			p.In.Log.Info("Undid an interrupted creation", "volume", name, "in", creating.String())
		}
		return err
	}
	id, err := volume.ParseEntry(name)
	if err != nil {
		return undo()
	}
	return p.UnlessBusy(id, undo)
}

// undoNamed undoes the creation that an entry of a directory of creating/ is of.
func (p *Leftovers) undoNamed(creating *dir.Dir, name string) error {
	if id, err := volume.ParseEntry(name); err == nil {
		if err := p.In.Store.Records().Undo(id); err != nil {
			return err
		}
	}
	return p.throwCreation(creating, name)
}

// RecoverReferences begins the removal of references of volumes that are not fenced: before the fence only the movers know of a move,
// and they do without. RecoverTrash finishes it.
func (p *Leftovers) RecoverReferences() error {
	for id, err := range p.In.Store.Records().All() {
		if err != nil {
			return err
		}
		of, _, is := id.Referenced()
		if !is {
			continue
		}
		p.In.Step()
		p.In.Left(id.String(), p.UnlessBusy(id, func() error { return p.recoverReference(id, of) }))
	}
	return nil
}

func (p *Leftovers) recoverReference(id, of volume.ID) error {
	rec, err := p.In.Store.Records().Read(of)
	if err != nil || rec != nil && rec.Move.Role == store.MoveSource {
		return err
	}
	e, d, err := p.In.Lookup(id)
	if err != nil {
		return err
	}
	if d == nil {
		return p.forgetRemoved(id, e)
	}
	thrown, err := p.In.Store.Trash().Remove(id, store.Trashed(id, e))
	if err == nil && thrown == "" {
		err = p.forgetRemoved(id, e)
	}
	return errors.Join(err, d.Close())
}

// forgetRemoved drops the record of an entry that was removed at once. One that is in the trash has its record until RecoverTrash.
func (p *Leftovers) forgetRemoved(id volume.ID, e store.Entry) error {
	thrown, err := p.In.Store.Trash().All()
	if err != nil {
		return err
	}
	for _, name := range thrown {
		if of, _ := store.ParseTrashName(name).Volume(); of == id {
			return nil
		}
	}
	if err := p.In.Store.Records().Drop(id); err != nil {
		return err
	}
	p.In.Ledger.Note(id, InfoOf(store.Entry{}))
	p.ReleaseLost(id, e)
	return nil
}

// RecoverTrash finishes removals that had not dropped their record, and queues all trash
// that was not known: from before a start, and of volumes whose deletion failed.
func (p *Leftovers) RecoverTrash() error {
	thrown, err := p.In.Store.Trash().All()
	if err != nil {
		return err
	}
	for _, name := range thrown {
		if p.In.Ledger.Trash().Has(name) {
			continue
		}
		p.In.Step()
		p.In.Left(path.Join(p.In.Store.Trash().Dir().String(), name), p.recoverTrashed(name))
	}
	return nil
}

func (p *Leftovers) recoverTrashed(name string) error {
	id, _ := store.ParseTrashName(name).Volume()
	return p.UnlessBusy(id, func() error {
		erased := p.In.Ledger.Trash().Erased()
		return p.In.Store.Trash().In(name, func(in *dir.Dir, entry string) error {
			// The reaper may have erased and forgotten it since the trash was listed.
			if exists, err := in.Exists(entry); err != nil || !exists {
				return err
			}
			if err := p.finishRemoval(in, name); err != nil {
				return err
			}
			p.queueFound(in, entry, name, erased)
			return nil
		})
	})
}

// queueFound queues a piece of trash that was found, unless any was erased since the number that is given, and claims the id that it
// carries.
func (p *Leftovers) queueFound(in *dir.Dir, entry, name string, erased uint64) {
	id, err := p.In.Enforcer.IDs.In(in, entry)
	if err != nil {
		id = 0 // its disk cannot read it: the reaper reports it
	}
	t := store.ParseTrashName(name)
	p.In.Enforcer.IDs.Claims.Try(id, t.UID)
	if t.Promised == volume.Unknown {
		t.Promised = p.In.Usage().HeldBy(in, entry, id)
	}
	p.In.Ledger.Trash().ThrowFound(name, t.Promised, erased)
}

// finishRemoval drops the record of a volume that is in a directory of trash.
func (p *Leftovers) finishRemoval(trash *dir.Dir, name string) error {
	id, dropped, err := p.In.Store.Trash().FinishRemoval(trash, name)
	if dropped {
		p.In.Log.Info("Finished an interrupted removal", "volume", id.String())
	}
	if err == nil && dropped {
		p.In.Ledger.Note(id, InfoOf(store.Entry{}))
	}
	return err
}

// TakeOver takes over from all other nodes, in a shared pool from those that are gone.
func (p *Leftovers) TakeOver() {
	err := p.In.Store.Nodes().EachLeft(p.stillTheirs(), func(node string, creating, trash *dir.Dir) error {
		return errors.Join(p.RecoverCreations(creating), p.takeTrash(trash, node))
	})
	p.In.Left(path.Dir(p.In.Store.Trash().Dir().String()), err)
}

// stillTheirs says which nodes of a shared pool finish what they left. All that others left in another pool is this node's.
func (p *Leftovers) stillTheirs() func(node, sign string) bool {
	if !p.In.Config.Shared {
		return nil
	}
	return p.In.Peers.Within(store.UnseenAfter)
}

func (p *Leftovers) takeTrash(left *dir.Dir, node string) error {
	thrown, err := store.Names(left)
	if err != nil {
		return err
	}
	for _, name := range thrown {
		take := func() error {
			err := p.takePiece(left, name)
			if err == nil {
				p.In.Log.Info("Took over trash of a departed node", "trash", name, "node", node)
			}
			return err
		}
		id, _ := store.ParseTrashName(name).Volume()
		p.In.Left(path.Join(left.String(), name), p.UnlessBusy(id, take))
	}
	return nil
}

// takePiece takes one piece of trash over, and claims the id that it carries.
func (p *Leftovers) takePiece(left *dir.Dir, name string) error {
	if err := p.finishRemoval(left, name); err != nil {
		return err
	}
	carried, err := p.In.Enforcer.IDs.In(left, name)
	if err != nil {
		return err
	}
	// The index may have had the volume, and its record the id.
	t := store.ParseTrashName(name)
	if uid := p.In.Enforcer.IDs.Claims.Owner(carried); uid == "" || uid != t.UID {
		t.UID = store.RandomSuffix()
	}
	p.In.Enforcer.IDs.Claims.Try(carried, t.UID)
	if t.Promised == volume.Unknown {
		t.Promised = p.In.Usage().HeldBy(left, name, carried)
	}
	t.Of = store.RandomSuffix()
	return p.throw(left, name, t)
}
