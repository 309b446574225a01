package reconcile

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Erase removes pieces of trash, the first ones first, until ctx ends. Files counts the files and
// directories that were taken on.
func (p *Leftovers) Erase(ctx context.Context, names []string, files *atomic.Uint64) {
	p.MeasureTrash()
	slowly := &Pace{Done: files} // of all pieces: small ones have less than a burst
	for _, name := range names {
		start := time.Now()
		err := p.eraseAlone(ctx, name, slowly.Step)
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, volume.ErrBusy) {
			err = nil // another node erases it; what that leaves is found again
		}
		p.Ledger.TrashTried(name, err)
		if err != nil {
			p.Failed(err, "Failed to erase trash; it is kept and tried again", "trash", name)
			p.measureStuck(ctx, name)
			continue
		}
		p.Log.V(4).Info("Removed trash", "trash", name, "duration", time.Since(start))
	}
}

// measureStuck finds out what a piece of trash occupies that stays and had too many files to
// count them at the start. Until then all that is taken on the filesystem counts as foreign.
func (p *Leftovers) measureStuck(ctx context.Context, name string) {
	if p.Ledger.TrashPromise(name) != volume.Unknown {
		return
	}
	slowly := &Pace{Done: new(atomic.Uint64)}
	var bytes int64
	err := p.Store.InPiece(name, func(in *dir.Dir, entry string) (err error) {
		bytes, err = in.Occupied(entry, func() error { return slowly.Step(ctx) })
		return err
	})
	if err != nil {
		p.Log.Error(err, "Failed to measure trash that is kept", "trash", name)
		return
	}
	p.Ledger.TrashHolds(name, bytes)
}

func (p *Leftovers) eraseAlone(ctx context.Context, name string, pause func(context.Context) error) error {
	unlock, err := p.Store.LockPiece(name)
	if err != nil {
		return err
	}
	defer unlock()
	return p.erase(ctx, name, pause)
}

// erase removes a piece of trash, and then gives its id back: not before, for what
// is left of the tree would count against the next volume.
func (p *Leftovers) erase(ctx context.Context, name string, pause func(context.Context) error) error {
	var id quota.ID
	err := p.Store.InPiece(name, func(in *dir.Dir, entry string) (err error) {
		if _, err := in.Unprotect(entry); err != nil { // or no limit can be lifted
			return err
		}
		if id, err = p.Keeper.Lift(in, entry, store.ParseThrown(name).UID); err != nil {
			return err
		}
		id = p.Ledger.TrashID(name, id)
		return in.RemoveTree(ctx, entry, pause)
	})
	if err != nil {
		return err
	}
	return p.Keeper.Release(p.Store.Root(), p.Ledger.TrashID(name, id))
}
