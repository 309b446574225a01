package pool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/snapshot"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A SnapshotRequest is for a new snapshot.
type SnapshotRequest = snapshot.Request

// A Snapshot is what is reported of one.
type Snapshot = snapshot.Snapshot

// A CopyWay is how a snapshot is to be made.
type CopyWay = snapshot.Way

// A Source is what a new volume is to be made from.
type Source = snapshot.Wanted

// Snapshots are made of volumes, found and removed, also those of the upstream driver.
type Snapshots struct{ set *Set }

// Snapshots are those of all pools.
func (s *Set) Snapshots() Snapshots { return Snapshots{s} }

// Create makes a snapshot, or returns the one that is there if it is of the same source.
// When it returns, the snapshot is durable. Once it has begun it goes on when ctx ends, and
// the caller, who holds the lock of the snapshot's id, keeps that until Create returns.
// Errors: ErrNotFound for the source, ErrExists, ErrPrecondition, ErrBusy, ErrUnavailable,
// ErrDamagedRecord, ErrLost, ErrIO.
func (s Snapshots) Create(ctx context.Context, r SnapshotRequest) (Snapshot, error) {
	made, err := s.made(r)
	if !errors.Is(err, volume.ErrNotFound) {
		return made, err
	}
	in, err := s.set.find(r.Source, volume.PoolName{})
	if err != nil {
		return Snapshot{}, err
	}
	in.close() // it is read again under its lock
	p := in.visit.Pool
	if err := elsewhere(s.set.holders(r.ID), r.ID, p); err != nil {
		return Snapshot{}, err
	}
	ctx, end := s.set.UntilClose(ctx)
	defer end()
	made, err = s.create(ctx, p, r)
	if err != nil {
		return Snapshot{}, fmt.Errorf("snapshot volume %s in pool %q: %w", r.Source, p.Config.Name, err)
	}
	return made, nil
}

// made answers a repeated call. The source may be gone by then.
func (s Snapshots) made(r SnapshotRequest) (Snapshot, error) {
	in, err := s.set.findIn(s.set.holders(r.ID), r.ID)
	if err != nil {
		return Snapshot{}, err
	}
	defer in.close()
	return in.visit.snapshots().Existing(r, in.entry)
}

func (s Snapshots) create(ctx context.Context, p *serve.Pool, r SnapshotRequest) (Snapshot, error) {
	v, err := s.set.enter(p)
	if err != nil {
		return Snapshot{}, err
	}
	defer v.Close()
	e, d, err := v.Scan().Lookup(r.ID)
	if d != nil {
		_ = d.Close()
	}
	if err != nil {
		return Snapshot{}, err
	}
	if p.Note(r.ID, e); e.Exists() {
		return v.snapshots().Existing(r, e)
	}
	if err := p.OthersAreRead(); err != nil {
		return Snapshot{}, err
	}
	if err := v.Work(); err != nil {
		return Snapshot{}, v.snapshots().NotPossible(err)
	}
	if err := v.Discard().NoneLeft(r.ID); err != nil {
		return Snapshot{}, err
	}
	if err := v.snapshots().Count(r.Source); err != nil {
		return Snapshot{}, v.snapshots().NotPossible(err)
	}
	unlock, err := v.LockToPin(r.Source)
	if err != nil {
		return Snapshot{}, err
	}
	src, err := v.snapshots().Open(r.Source, r.Way, unlock)
	if err != nil {
		return Snapshot{}, v.snapshots().NotPossible(err)
	}
	defer src.Close()
	defer v.Making()()
	return v.snapshots().Make(ctx, r, src)
}

// snapshots is the pool for copying what is in it.
func (v *visit) snapshots() *snapshot.Pool {
	return &snapshot.Pool{Pool: v.Scan(), Entries: v, Limits: v.Pool.Limits(), Pins: v.pins, Freezer: v.Pool.Options.Freezer}
}

// Written reports whether pods or devices of this node may write to a volume.
func (v *visit) Written(id volume.ID, e store.Entry, d *dir.Dir) (bool, error) {
	return v.Use(id, e, d).Written()
}

// PublishedAt are the paths at which this node has a volume, or what is inside it.
func (v *visit) PublishedAt(id volume.ID, e store.Entry, d *dir.Dir) ([]string, error) {
	published, err := v.Use(id, e, d).Published()
	var paths []string
	for _, p := range published {
		paths = append(paths, p.Path)
	}
	return paths, err
}

// sourceElsewhere returns ErrInvalid for a source that is known to be in another pool. Pools
// may lie on different filesystems, whose files share no blocks.
func sourceElsewhere(holders []*serve.Pool, id volume.ID, chosen *serve.Pool) error {
	for _, p := range holders {
		if p != chosen {
			return fmt.Errorf("%w: its source, %s, is in pool %q, and a volume is made in the pool of its source", volume.ErrInvalid, id.Named(), p.Config.Name)
		}
	}
	return nil
}

// openRequested opens what a volume is to be made from.
func (v *visit) openRequested(r Request) (*snapshot.Source, error) {
	if err := v.Discard().NoneLeft(r.ID); err != nil {
		return nil, err
	}
	if r.Source.ID == r.ID { // which is not there: its lock is the caller's
		return v.snapshots().Requested(r.Source, r.Mode, func() {})
	}
	unlock, err := v.LockToPin(r.Source.ID)
	if err != nil {
		return nil, fmt.Errorf("its source: %w", err)
	}
	if r.Source.Upstream && !v.Pool.Ledger.Known(r.Source.ID).Exists() {
		src, err := v.sourceUpstream(r.Source.ID, r.Mode, unlock)
		if err != nil {
			return nil, fmt.Errorf("its source: %w", err)
		}
		return src, nil
	}
	return v.snapshots().Requested(r.Source, r.Mode, unlock)
}

// Delete removes a snapshot, or returns ErrNotFound. When it returns the snapshot is
// gone durably; its content goes later. The caller holds the lock of its id. Errors: ErrBusy
// while a volume is made from it.
func (s Snapshots) Delete(ctx context.Context, id volume.ID) error {
	in, err := s.set.find(id, volume.PoolName{})
	if err != nil {
		return unlessOutOfUse(s.set.Node, id, err)
	}
	defer in.close()
	if err := s.set.pins.Free(id); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	err = trace.Step(ctx, "move to the trash", func() error { return in.visit.remove(id, in.entry) })
	if errors.Is(err, syscall.EROFS) {
		err = in.visit.Pool.Unavailable(err)
	}
	if err != nil {
		return fmt.Errorf("delete %s: %w", id.Named(), err)
	}
	return nil
}

// Find reports on one snapshot. Errors: ErrNotFound, ErrUnavailable, ErrDamagedRecord.
func (s Snapshots) Find(_ context.Context, id volume.ID) (Snapshot, error) {
	in, err := s.set.findSettled(id)
	if err != nil {
		return Snapshot{}, err
	}
	defer in.close()
	switch {
	case in.entry.Damage != nil:
		return Snapshot{}, in.entry.Damage
	case in.entry.Record == nil:
		return Snapshot{}, fmt.Errorf("%w of %s: there is none", volume.ErrDamagedRecord, id.Named())
	}
	return in.visit.snapshots().Describe(id, in.entry), nil
}

// List returns up to most snapshots in the order of their ids, beginning after an id; the zero
// id comes before all. If others follow, next is the id to go on after. Only those of a source
// are reported, if it is not the zero id. Pools that do not serve are left out, and so is a
// snapshot whose record cannot be read: its source is not known. Those of the upstream KubeVirt
// driver are among them, and references are not.
func (s Snapshots) List(ctx context.Context, after, of volume.ID, most int) (page []Snapshot, next volume.ID) {
	if after == (volume.ID{}) {
		after = volume.FirstSnapshot()
	}
	var all []volume.ID
	for _, p := range s.set.Pools {
		for id := range p.Ledger.EachAfter(after, ledger.Card.Exists) {
			all = append(all, id)
		}
		for _, id := range upstreamSnapshots(p) {
			if id.Compare(after) > 0 {
				all = append(all, id)
			}
		}
	}
	slices.SortFunc(all, volume.ID.Compare)
	for _, id := range slices.DeleteFunc(slices.Compact(all), volume.ID.IsReference) {
		found, err := s.Find(ctx, id)
		if err != nil {
			found, err = s.FindUpstream(ctx, id)
		}
		if err != nil || of != (volume.ID{}) && found.Origin.ID != of.String() {
			continue
		}
		if len(page) == most {
			return page, page[most-1].ID
		}
		page = append(page, found)
	}
	return page, volume.ID{}
}
