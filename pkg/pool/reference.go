package pool

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Reference makes a copy of a volume that does not move yet and may be in use, for the passes of a move, unless the one of that token
// is there. The volume's other references are removed, but for one that is kept. It counts as a snapshot does, and no call on a
// snapshot reaches it. The caller holds no lock. Errors: ErrInvalid, ErrPrecondition also for a move that was undone and where a copy would
// share no blocks, and those of Snapshot.
func (s Moves) Reference(ctx context.Context, m Move, token, kept string) error {
	id := m.Volume
	reference, err := id.Reference(token)
	if err != nil {
		return err
	}
	unlock, err := s.lockReferences(id)
	if err != nil {
		return err
	}
	defer unlock()
	if err := s.movable(ctx, m); err != nil { // before what a last pass may need is removed
		return err
	}
	if err := s.dropOthers(ctx, id, token, kept); err != nil {
		return err
	}
	unlock, err = s.set.node.Lock(reference)
	if err != nil {
		return err
	}
	defer unlock()
	_, err = s.set.Snapshots().Create(ctx, SnapshotRequest{ID: reference, Source: id, Way: CopyWay{WhenWritten: volume.Accept, MaxStall: mostStall, Shared: true}})
	return err
}

// mostStall is for how long pods may wait while the blocks of one file are shared.
const mostStall = time.Second

// lockReferences has no other call make or remove references of a volume, or returns ErrBusy: one that is being made would be there
// after all were removed.
func (s Moves) lockReferences(id volume.ID) (unlock func(), err error) {
	all, err := id.Reference("0") // which is none
	if err != nil {
		return nil, err
	}
	return s.set.node.Lock(all)
}

func (s Moves) movable(ctx context.Context, m Move) error {
	v, err := s.findToMove(ctx, m.Volume)
	if err != nil {
		return err
	}
	defer v.close()
	return cmp.Or(v.movable(), s.notUndone(m, v.entry.Record))
}

// dropReferences removes the references of a volume.
func (s Moves) dropReferences(ctx context.Context, id volume.ID) error {
	unlock, err := s.lockReferences(id)
	if errors.Is(err, volume.ErrInvalid) { // its id is too long for one
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	return s.dropOthers(ctx, id)
}

// dropOthers removes the references of a volume but for those that are kept. The caller has lockReferences.
func (s Moves) dropOthers(ctx context.Context, id volume.ID, kept ...string) error {
	var all []volume.ID
	for _, p := range s.set.node.Pools {
		for reference := range p.Ledger.EachAfter(volume.BeforeReferences(), ledger.Info.Exists) {
			of, token, is := reference.Referenced()
			if !is {
				break
			}
			if of == id && !slices.Contains(kept, token) {
				all = append(all, reference)
			}
		}
	}
	for _, reference := range all {
		unlock, err := s.set.node.Lock(reference)
		if err == nil {
			err = s.set.Snapshots().Delete(ctx, reference)
			unlock()
		}
		if err != nil && !errors.Is(err, volume.ErrNotFound) {
			return err
		}
	}
	return nil
}
