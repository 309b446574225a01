package pool

import (
	"context"
	"errors"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A moment is when recovery is done.
type moment uint8

const (
	// atOpen is before the pool serves: no call works on it.
	atOpen moment = 1 << iota
	// again is while it serves, after a start that could not recover all: the pool was
	// read-only, or another node worked on a volume.
	again
	// eachMinute is while it serves, for what changes by hand, and what failed calls and
	// departed nodes left.
	eachMinute
)

// A recoveryStep brings one thing on disk or in memory in order.
type recoveryStep struct {
	what string
	at   moment // the moments at which it is done
	// writable are the moments at which it is left out while the pool is read-only.
	writable moment
	// only says in which pools it is done; nil for all.
	only func(p *Pool, at moment) bool
	// together: steps that follow each other and have it are all done, also if one fails.
	together bool
	do       func(v *visit, ctx context.Context) error
}

// recovery is all that recovery does, in its order. docs/layout.md has the same table for users.
var recovery = []recoveryStep{
	{what: "compare the index with the disk", at: eachMinute, do: (*visit).resyncAll},
	{what: "open the directories of this node", at: eachMinute, writable: eachMinute, do: func(v *visit, _ context.Context) error { return v.work() }},
	{what: "remove records that were being written", at: atOpen | again, writable: atOpen, together: true, do: (*visit).recoverRecords},
	{what: "undo creations", at: atOpen | again | eachMinute, writable: atOpen | eachMinute, together: true, do: func(v *visit, _ context.Context) error { return v.recoverCreations(v.store.Creating()) }},
	{what: "finish removals and queue the trash", at: atOpen | again | eachMinute, writable: atOpen | eachMinute, together: true, do: (*visit).recoverTrash},
	{what: "take over what this node left under another name", at: atOpen | again, writable: atOpen, only: notShared, do: func(v *visit, _ context.Context) error { return v.takeOverAll(false) }},
	{what: "load the index", at: atOpen, do: func(v *visit, _ context.Context) error { return v.scan().Load() }},
	{what: "finish growths of files", at: atOpen | again, do: (*visit).finishFiles},
	{what: "restore limits", at: atOpen, do: (*visit).restoreLimits},
	{what: "restore limits during calls", at: again, do: func(v *visit, _ context.Context) error {
		v.queueLimitChecks()
		v.restoreAgain()
		return nil
	}},
	{what: "remove limits that nothing has", at: atOpen, do: (*visit).releaseUnused},
	{what: "detach devices that are not published", at: atOpen | eachMinute, writable: eachMinute, do: (*visit).sweepDevices},
	{what: "detach devices on deleted files", at: atOpen | eachMinute, writable: eachMinute, do: (*visit).sweepDeleted},
	{what: "finish growths of devices", at: atOpen | again, do: (*visit).finishDevices},
	{what: "take over from nodes that are gone", at: eachMinute, writable: eachMinute, only: shared, do: (*visit).takeOver},
	{what: "remove stale marks of this node", at: atOpen | eachMinute, writable: eachMinute, only: func(p *Pool, at moment) bool { return at == atOpen || p.config.Shared }, do: (*visit).recoverMarks},
}

func shared(p *Pool, _ moment) bool    { return p.config.Shared }
func notShared(p *Pool, _ moment) bool { return !p.config.Shared }

// recover does what is to be done at a moment. What a call works on is left to that.
func (v *visit) recover(ctx context.Context, at moment) error {
	space, err := v.store.Space()
	if err != nil {
		return err
	}
	if space.ReadOnly && at == atOpen {
		v.pool.unrecovered = true
	}
	var problems error
	for _, step := range recovery {
		switch {
		case step.at&at == 0, step.writable&at != 0 && space.ReadOnly, step.only != nil && !step.only(v.pool, at):
			continue
		case problems != nil && !step.together:
			return problems
		}
		err := step.do(v, ctx)
		if err != nil && !step.together {
			return err
		}
		problems = errors.Join(problems, err)
	}
	return problems
}

// begin brings disk and memory in line before the pool serves.
func (v *visit) begin(ctx context.Context) error {
	if err := v.recover(ctx, atOpen); err != nil {
		return err
	}
	// What other nodes work on they finish. What they only read is left to this one.
	v.pool.unrecovered, v.pool.tried = v.pool.unrecovered || v.pool.skipped, time.Now()
	return nil
}

// recoverAgain does what begin could not do: the pool was read-only, or another node worked on
// a volume. Calls are at work by then.
func (v *visit) recoverAgain(ctx context.Context) (done bool, err error) {
	if !v.pool.unrecovered || v.pool.skipped && time.Since(v.pool.tried) < v.pool.options.SyncEvery {
		return false, nil
	}
	if space, err := v.store.Space(); err != nil || space.ReadOnly {
		return false, err
	}
	if err := errors.Join(v.store.CloseMode(), v.work()); err != nil {
		return false, err
	}
	v.pool.skipped = false
	if err := v.recover(ctx, again); err != nil {
		return false, err
	}
	v.pool.unrecovered, v.pool.tried = v.pool.skipped, time.Now()
	return true, nil
}

// resyncAll compares the index with the disk while the pool serves: directories that were moved
// here by hand appear, and lost ones are noticed.
func (v *visit) resyncAll(context.Context) error {
	different, err := v.scan().Differing()
	if err != nil {
		return err
	}
	for id := range different {
		v.pool.steps.Add(1)
		if err := v.resync(id); err != nil {
			return err
		}
	}
	return nil
}

// resync takes one volume from the disk, unless a call is working on it.
func (v *visit) resync(id volume.ID) error {
	unlock, err := v.tryLock(id)
	if errors.Is(err, volume.ErrBusy) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	e, d, err := v.scan().Lookup(id)
	if d != nil {
		_ = d.Close()
	}
	if err != nil {
		return err
	}
	if e.Exists() && e.Lost() && !v.pool.ledger.Known(id).Lost() {
		v.pool.log.Error(volume.ErrNotFound, "the directory of a volume is missing; its record is kept", "volume", id.String())
	}
	v.scan().Claim(id, e)
	v.pool.note(id, e)
	return nil
}

// recoverRecords removes records that were being written.
func (v *visit) recoverRecords(context.Context) error {
	for t, err := range v.store.Unwritten() {
		if err != nil {
			return err
		}
		if err := v.unlessBusyOr(t.Of, func() error { return v.store.RemoveUnwritten(t) }); err != nil {
			return err
		}
	}
	return nil
}

// recoverCreations undoes the creations that a directory of creating/ has: none of them was
// answered.
func (v *visit) recoverCreations(creating *dir.Dir) error {
	names, err := store.Names(creating)
	if err != nil {
		return err
	}
	for _, name := range names {
		v.pool.steps.Add(1)
		if err := v.recoverCreation(creating, name); err != nil {
			return err
		}
	}
	return nil
}

func (v *visit) recoverCreation(creating *dir.Dir, name string) error {
	undo := func() error {
		// The call that was making it may have ended since the names were read.
		if exists, err := creating.Exists(name); err != nil || !exists {
			return err
		}
		v.pool.log.Info("undoing an interrupted creation", "volume", name, "in", creating.String())
		return v.undoNamed(creating, name)
	}
	id, err := volume.ParseID(name)
	if err != nil {
		return undo()
	}
	return v.unlessBusy(id, undo)
}

// undoNamed undoes the creation that an entry of a directory of creating/ is of.
func (v *visit) undoNamed(creating *dir.Dir, name string) error {
	if id, err := volume.ParseID(name); err == nil {
		if err := v.store.UndoRecord(id); err != nil {
			return err
		}
	}
	return v.throwCreation(creating, name)
}

// undoCreation undoes a creation of this node, the record first: what is in creating/
// is the sign that there is something to undo.
func (v *visit) undoCreation(id volume.ID) error {
	if err := v.store.UndoRecord(id); err != nil {
		return err
	}
	return v.discardCreation(id.String())
}

// recoverTrash finishes removals that had not dropped their record, and queues all trash
// that was not known: from before a start, and of volumes whose deletion failed.
func (v *visit) recoverTrash(context.Context) error {
	thrown, err := store.Names(v.store.Trash())
	if err != nil {
		return err
	}
	for _, name := range thrown {
		if v.pool.ledger.HasTrash(name) {
			continue
		}
		v.pool.steps.Add(1)
		if err := v.recoverTrashed(name); err != nil {
			return err
		}
	}
	return nil
}

func (v *visit) recoverTrashed(name string) error {
	queue := func() error {
		erased := v.pool.ledger.Erased()
		// The reaper may have erased and forgotten it since the trash was listed.
		if exists, err := v.store.Trash().Exists(name); err != nil || !exists {
			return err
		}
		if err := v.finishRemoval(name); err != nil {
			return err
		}
		id, err := v.keeper.IDIn(v.store.Trash(), name)
		if err != nil {
			return err
		}
		t := store.ParseThrown(name)
		v.keeper.Claims().Try(id, t.UID)
		if t.Promised == volume.Unknown {
			t.Promised = v.scan().HeldBy(v.store.Trash(), name, id)
		}
		if v.pool.ledger.ThrowFound(name, t.Promised, erased) {
			v.pool.wakeReaper()
		}
		return nil
	}
	id, _ := store.ParseThrown(name).Volume()
	return v.unlessBusyOr(id, queue)
}

// finishRemoval drops the record of a volume that is in the trash.
func (v *visit) finishRemoval(name string) error {
	id, dropped, err := v.store.FinishRemoval(name)
	if dropped {
		v.pool.log.Info("finished an interrupted removal", "volume", id.String())
	}
	if err == nil && dropped {
		v.pool.note(id, store.Entry{})
	}
	return err
}

// takeOver shows that this node is alive, and finishes what nodes left that are gone. What
// cannot be taken over now is tried again: it does not keep the pool from serving.
func (v *visit) takeOver(context.Context) error {
	err := v.store.Touch()
	if err == nil {
		err = v.takeOverAll(true)
	}
	if err != nil {
		v.pool.log.Error(err, "cleanup of departed nodes failed")
	}
	return nil
}

// takeOverAll takes over from all other nodes, or from those that are gone.
func (v *visit) takeOverAll(goneOnly bool) error {
	return v.store.EachLeft(goneOnly, func(node string, creating, trash *dir.Dir) error {
		return errors.Join(v.recoverCreations(creating), v.takeTrash(trash, node))
	})
}

func (v *visit) takeTrash(left *dir.Dir, node string) error {
	thrown, err := store.Names(left)
	if err != nil {
		return err
	}
	for _, name := range thrown {
		take := func() error {
			v.pool.log.Info("taking over the trash of a departed node", "trash", name, "node", node)
			return v.takePiece(left, name)
		}
		id, _ := store.ParseThrown(name).Volume()
		if err := v.unlessBusyOr(id, take); err != nil {
			return err
		}
	}
	return nil
}

// takePiece takes one piece of trash over, and claims the id that it carries.
func (v *visit) takePiece(left *dir.Dir, name string) error {
	if err := v.finishRemoval(name); err != nil {
		return err
	}
	carried, err := v.keeper.IDIn(left, name)
	if err != nil {
		return err
	}
	// The index may have had the volume, and its record the id.
	t := store.ParseThrown(name)
	if uid := v.keeper.Claims().Owner(carried); uid == "" || uid != t.UID {
		t.UID = store.RandomSuffix()
	}
	v.keeper.Claims().Try(carried, t.UID)
	if t.Promised == volume.Unknown {
		t.Promised = v.scan().HeldBy(left, name, carried)
	}
	t.Of = store.RandomSuffix()
	return v.throw(left, name, t)
}

// recoverMarks removes the marks of what this node has published no more: it was restarted, or
// the pool was away when a volume was unpublished.
func (v *visit) recoverMarks(context.Context) error {
	return v.store.RecoverMarks(v.unlessBusyOr, v.recoverMark)
}

func (v *visit) recoverMark(id volume.ID) error {
	unlock, err := v.pool.locks.TryLock(id)
	if err != nil {
		return nil // a call is at work on it, and sees to it
	}
	defer unlock()
	e, d, err := v.scan().Lookup(id)
	if err != nil {
		return err
	}
	if d != nil {
		defer func() { _ = d.Close() }()
	}
	return (&found{id: id, visit: v, entry: e, dir: d}).unmarkPublished()
}
