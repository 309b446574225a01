package reconcile

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// turn is how many files and directories of one piece of trash are removed before the next piece is taken on: in about a second, so
// that the space of small volumes is not held up by large ones.
const turn = 4096

// Erase removes pieces of trash in turns, the first ones first, and those that come meanwhile, until ctx ends. Files counts the files
// and directories that were taken on.
func (p *Leftovers) Erase(ctx context.Context, names []string, files *atomic.Uint64) {
	slowly := &Pace{Done: files} // of all pieces: small ones have less than a burst
	for len(names) > 0 {
		p.In.Usage().MeasureTrash()
		begun := p.eraseInTurn(ctx, names, slowly)
		if len(begun) == 0 || ctx.Err() != nil {
			return
		}
		names = p.In.Ledger.Trash().Names(false)
		for _, name := range begun {
			if !slices.Contains(names, name) { // it was stuck, and is not any more
				names = append(names, name)
			}
		}
	}
}

// eraseInTurn gives each piece a turn, and returns those that need another.
func (p *Leftovers) eraseInTurn(ctx context.Context, names []string, slowly *Pace) (begun []string) {
	shared := &erased{in: p.In}
	defer shared.giveBack()
	for _, name := range names {
		shared.giveBackInTime()
		start := time.Now()
		more, err := p.eraseAlone(ctx, name, slowly, turn)
		if more && !errors.Is(err, context.Canceled) {
			// What cannot be removed would be met again in each turn.
			more, err = p.eraseAlone(ctx, name, slowly, math.MaxInt)
		}
		if ctx.Err() != nil {
			return nil
		}
		if more {
			begun = append(begun, name)
			continue
		}
		if errors.Is(err, volume.ErrBusy) {
			err = nil // another node erases it; what that leaves is found again
		}
		if err != nil {
			p.In.Ledger.Trash().Tried(name, err)
			p.In.Failed(err, "Failed to erase trash; it is kept and tried again", "trash", name)
			p.measureStuck(ctx, name)
			continue
		}
		shared.add(name)
		p.In.Log.V(4).Info("Removed trash", "trash", name, "duration", time.Since(start))
	}
	return begun
}

// erased are pieces of trash that may have shared blocks with volumes. Their promises are given back once it is measured what these volumes take
// without them, which is done for many pieces at once.
type erased struct {
	in    *View
	names []string
	since time.Time // of the first one
}

// add gives the promise of an erased piece back, now or later.
func (e *erased) add(name string) {
	trash := e.in.Ledger.Trash()
	if family, known := trash.Family(name); known && family == "" || e.in.Ledger.BeginExcess() == nil {
		trash.Tried(name, nil)
		return
	}
	if len(e.names) == 0 {
		e.since = time.Now()
	}
	e.names = append(e.names, name)
}

// giveBackInTime is giveBack once a second.
func (e *erased) giveBackInTime() {
	if time.Since(e.since) >= time.Second {
		e.giveBack()
	}
}

func (e *erased) giveBack() {
	if len(e.names) == 0 {
		return
	}
	e.in.Usage().MeasureExcess()
	for _, name := range e.names {
		e.in.Ledger.Trash().Tried(name, nil)
	}
	e.names = nil
}

// measureStuck finds out what a piece of trash occupies that stays and had too many files to
// count them at the start. Until then all that is taken on the filesystem counts as foreign.
func (p *Leftovers) measureStuck(ctx context.Context, name string) {
	if p.In.Ledger.Trash().Promise(name) != volume.Unknown {
		return
	}
	slowly := &Pace{Done: new(atomic.Uint64)}
	var bytes int64
	err := p.In.Store.Trash().In(name, func(in *dir.Dir, entry string) (err error) {
		bytes, err = dir.Occupied(in, entry, func() error { return slowly.Step(ctx) })
		return err
	})
	if err != nil {
		p.In.Log.Error(err, "Failed to measure trash that is kept", "trash", name)
		return
	}
	p.In.Ledger.Trash().Holds(name, bytes)
}

// eraseAlone removes a piece of trash, or that many of its files and directories, and reports whether there were more. The error is
// context.Canceled then, unless one of them could not be removed.
func (p *Leftovers) eraseAlone(ctx context.Context, name string, slowly *Pace, most int) (more bool, err error) {
	unlock, err := p.In.Store.Trash().Lock(name)
	if err != nil {
		return false, err
	}
	defer unlock()
	return inTurn(ctx, most, slowly.Step, func(ctx context.Context, pause func(context.Context) error) error {
		return p.erase(ctx, name, pause)
	})
}

// eraseThere removes an entry that is in no trash, or a turn of its files and directories, and reports whether there were more, as
// eraseAlone does. The uid is that of the id which it carries.
func (p *Leftovers) eraseThere(in *dir.Dir, name, uid string) (more bool, err error) {
	step := func(ctx context.Context) error {
		p.In.Step()
		return ctx.Err()
	}
	return inTurn(context.Background(), turn, step, func(ctx context.Context, pause func(context.Context) error) error {
		id, err := p.eraseTree(ctx, in, name, uid, pause)
		if err != nil {
			return err
		}
		return p.In.Enforcer.IDs.Release(p.In.Store.Root(), id)
	})
}

// inTurn has a removal end after that many files and directories, and reports whether there were more.
func inTurn(ctx context.Context, most int, step func(context.Context) error, remove func(context.Context, func(context.Context) error) error) (more bool, err error) {
	ctx, end := context.WithCancel(ctx)
	defer end()
	err = remove(ctx, func(ctx context.Context) error {
		if most--; most < 0 {
			more = true
			end()
			return ctx.Err()
		}
		return step(ctx)
	})
	return more, err
}

// erase removes a piece of trash, and then gives its id back: not before, for what
// is left of the tree would count against the next volume.
func (p *Leftovers) erase(ctx context.Context, name string, pause func(context.Context) error) error {
	var id quota.ID
	err := p.In.Store.Trash().In(name, func(in *dir.Dir, entry string) (err error) {
		id, err = p.eraseTree(ctx, in, entry, store.ParseTrashName(name).UID, pause)
		return err
	})
	id = p.In.Ledger.Trash().ID(name, id)
	if err != nil {
		return err
	}
	return p.In.Enforcer.IDs.Release(p.In.Store.Root(), id)
}

// eraseTree removes an entry without its limit, and returns the id that it carries, also if not all of it could be removed.
func (p *Leftovers) eraseTree(ctx context.Context, in *dir.Dir, entry, uid string, pause func(context.Context) error) (quota.ID, error) {
	_, err := dir.Unprotect(in, entry) // or no limit can be lifted
	if errors.Is(err, syscall.EDQUOT) {
		// On btrfs that is charged to the entry, which may be a snapshot of a full volume. There a limit can be lifted before.
		if _, err = p.In.Enforcer.Lift(in, entry, uid); err == nil {
			_, err = dir.Unprotect(in, entry)
		}
	}
	if err != nil {
		return 0, err
	}
	id, err := p.In.Enforcer.Lift(in, entry, uid)
	if err != nil {
		return 0, err
	}
	return id, dir.RemoveTreeFreeing(ctx, in, entry, pause, quota.Free)
}
