package pool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/scan"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A SnapshotRequest is for a new snapshot.
type SnapshotRequest struct {
	// ID is one that volume.ParseSnapshot made.
	ID     volume.ID
	Source volume.ID
	// AcceptUnverified takes a tree as it comes if it does not hold still while it is copied.
	AcceptUnverified bool
}

// A Snapshot is what is reported of one.
type Snapshot struct {
	ID     volume.ID
	Pool   volume.PoolName
	Mode   volume.Mode
	Origin volume.Origin
	// Promised is what the pool keeps for it, in bytes.
	Promised int64
	// Lost: there is a record, but no directory.
	Lost bool
}

// Snapshot makes a snapshot, or answers the one that is there if it is of the same source.
// When it returns, the snapshot is durable. Once it has begun it goes on when ctx ends, and
// the caller, who holds the lock of the snapshot's id, keeps that until Snapshot returns.
// Errors: ErrNotFound for the source, ErrExists, ErrPrecondition, ErrBusy, ErrUnavailable,
// ErrDamagedRecord, ErrLost, ErrIO.
func (s *Set) Snapshot(ctx context.Context, r SnapshotRequest) (Snapshot, error) {
	made, err := s.snapshotMade(r)
	if !errors.Is(err, volume.ErrNotFound) {
		return made, err
	}
	in, err := s.find(r.Source, volume.PoolName{})
	if err != nil {
		return Snapshot{}, err
	}
	in.close() // it is read again under its lock
	p := in.visit.pool
	if err := s.elsewhere(r.ID, p); err != nil {
		return Snapshot{}, err
	}
	ctx, end := s.untilClose(ctx)
	defer end()
	made, err = p.snapshot(ctx, r)
	if err != nil {
		return Snapshot{}, fmt.Errorf("snapshot volume %s in pool %q: %w", r.Source, p.config.Name, err)
	}
	return made, nil
}

// snapshotMade answers a repeated call. The source may be gone by then.
func (s *Set) snapshotMade(r SnapshotRequest) (Snapshot, error) {
	in, err := findIn(s.holders(r.ID), r.ID)
	if err != nil {
		return Snapshot{}, err
	}
	defer in.close()
	return in.visit.existingSnapshot(r, in.entry)
}

func (v *visit) existingSnapshot(r SnapshotRequest, e store.Entry) (Snapshot, error) {
	switch {
	case e.Damage != nil:
		return Snapshot{}, e.Damage
	case e.Record == nil:
		return Snapshot{}, fmt.Errorf("%w of %s: there is none", volume.ErrDamagedRecord, r.ID.Named())
	case e.Record.Origin.ID != r.Source.String():
		return Snapshot{}, fmt.Errorf("%s: %w, of volume %s", r.ID.Named(), volume.ErrExists, e.Record.Origin.ID)
	case e.Lost():
		return Snapshot{}, fmt.Errorf("%s: %w: only its record is left", r.ID.Named(), volume.ErrLost)
	}
	// The call that made it may have failed at its last step.
	return v.pool.describeSnapshot(r.ID, e), v.store.SyncParent(r.ID)
}

func (p *Pool) describeSnapshot(id volume.ID, e store.Entry) Snapshot {
	return Snapshot{
		ID: id, Pool: p.config.Name, Mode: e.Record.Mode, Origin: *e.Record.Origin, Promised: e.Record.Bytes, Lost: e.Lost(),
	}
}

func (p *Pool) snapshot(ctx context.Context, r SnapshotRequest) (Snapshot, error) {
	v, err := p.enter()
	if err != nil {
		return Snapshot{}, err
	}
	defer v.close()
	if err := v.work(); err != nil {
		return Snapshot{}, err
	}
	e, d, err := v.scan().Lookup(r.ID)
	if d != nil {
		_ = d.Close()
	}
	if err != nil {
		return Snapshot{}, err
	}
	if p.note(r.ID, e); e.Exists() {
		return v.existingSnapshot(r, e)
	}
	src, err := v.openSource(r.Source)
	if err != nil {
		return Snapshot{}, err
	}
	defer src.close()
	return v.snapshotNew(ctx, r, src)
}

func (v *visit) snapshotNew(ctx context.Context, r SnapshotRequest, src *source) (Snapshot, error) {
	if err := v.pool.limits().Unfit(v.keeper); err != nil {
		return Snapshot{}, v.pool.unavailable(err)
	}
	space, err := v.store.Space()
	if err != nil {
		return Snapshot{}, err
	}
	if space.ReadOnly {
		return Snapshot{}, v.pool.unavailable(syscall.EROFS)
	}
	bytes, err := src.mostHeld(space)
	if err != nil {
		return Snapshot{}, err
	}
	held, err := v.pool.ledger.Reserve(space, bytes)
	if err != nil {
		return Snapshot{}, notPossible(err)
	}
	defer func() {
		if held.Release() {
			v.undo(r.ID)
		}
	}()
	rec := store.NewRecord(r.ID, src.entry.Mode(), bytes)
	rec.Thin = src.entry.Record.Thin
	if err := v.store.MakeParent(r.ID); err != nil {
		return Snapshot{}, notPossible(noSpace(err))
	}
	if err := src.begin(rec); err != nil {
		return Snapshot{}, err
	}
	if err := v.build(ctx, rec, src.make(ctx, rec), v.cut(ctx, r, src, rec)); err != nil {
		return Snapshot{}, notPossible(noSpace(err))
	}
	e := store.Entry{Record: rec, Present: true}
	held.Commit(r.ID, scan.CardOf(e))
	return v.pool.describeSnapshot(r.ID, e), nil
}

// notPossible is ErrPrecondition for a snapshot that does not fit: after RESOURCE_EXHAUSTED
// csi-snapshotter takes a snapshot for one that may still be made, and never lets go of it.
// docs/decisions/0031-snapshots.md has the reasons.
func notPossible(err error) error {
	if errors.Is(err, volume.ErrNoSpace) {
		return fmt.Errorf("%w: %v", volume.ErrPrecondition, err)
	}
	return err
}

// mostHeld is what a copy of the source may hold, in bytes: what the source does and a
// little more, where that is counted, or else all that it was promised.
func (s *source) mostHeld(space dir.Space) (int64, error) {
	c, promised := scan.CardOf(s.entry), s.entry.Record.Bytes
	if s.entry.Block() || !s.visit.keeper.Enforces(c) {
		return promised, nil
	}
	usage, err := s.visit.keeper.Usage(s.dir, c)
	if err != nil {
		return 0, err
	}
	return inBlocks(usage.Bytes+usage.Bytes/16+1<<20+ledger.OfInodes(s.visit.keeper.Kind(), usage.Inodes), space.BlockBytes), nil
}

func inBlocks(bytes, block int64) int64 { return (bytes + block - 1) / block * block }

// cut copies the source, notes in the record what came of that, and lowers the promise to what
// the copy holds: it cannot grow.
func (v *visit) cut(ctx context.Context, r SnapshotRequest, src *source, rec *store.Record) func(*dir.Dir) error {
	return func(d *dir.Dir) error {
		consistency, err := src.fill(ctx, d, r.AcceptUnverified)
		if err != nil {
			return err
		}
		if consistency == volume.Unverified && !r.AcceptUnverified {
			return errUnstill
		}
		rec.Origin.Consistency, rec.Origin.Cut = consistency, time.Now().UTC()
		held, err := v.heldBy(d, rec)
		if err != nil || held >= rec.Bytes {
			return err
		}
		rec.Bytes = held
		return v.keeper.Apply(d, scan.CardOf(store.Entry{Record: rec}))
	}
}

// heldBy is what a copy holds, in bytes, where that is known, or else what is promised to it.
func (v *visit) heldBy(d *dir.Dir, rec *store.Record) (int64, error) {
	c := scan.CardOf(store.Entry{Record: rec})
	switch {
	case rec.Mode == volume.ModeBlock:
		id, err := volume.ParseEntry(rec.ID)
		return content.Allocated(id, d), err
	case !v.keeper.Enforces(c):
		return rec.Bytes, nil
	}
	usage, err := v.keeper.Usage(d, c)
	return usage.Bytes + ledger.OfInodes(v.keeper.Kind(), usage.Inodes), err
}

// DeleteSnapshot removes a snapshot, or answers ErrNotFound. When it returns the snapshot is
// gone durably; its content goes later. The caller holds the lock of its id. Errors: ErrBusy
// while a volume is made from it.
func (s *Set) DeleteSnapshot(ctx context.Context, id volume.ID) error {
	in, err := s.find(id, volume.PoolName{})
	if err != nil {
		return err
	}
	defer in.close()
	if err := s.pins.free(id); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	err = trace.Step(ctx, "move to the trash", func() error { return in.visit.remove(id, in.entry) })
	if errors.Is(err, syscall.EROFS) {
		err = in.visit.pool.unavailable(err)
	}
	if err != nil {
		return fmt.Errorf("delete %s: %w", id.Named(), err)
	}
	return nil
}

// FindSnapshot reports on one snapshot. Errors: ErrNotFound, ErrUnavailable, ErrDamagedRecord.
func (s *Set) FindSnapshot(_ context.Context, id volume.ID) (Snapshot, error) {
	in, err := s.findSettled(id)
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
	return in.visit.pool.describeSnapshot(id, in.entry), nil
}

// Snapshots are up to most snapshots in the order of their ids, beginning after an id; the zero
// id comes before all. If others follow, next is the id to go on after. Only those of a source
// are reported, if it is not the zero id. Pools that do not serve are left out, and so is a
// snapshot whose record cannot be read: nobody knows of what it is.
func (s *Set) Snapshots(ctx context.Context, after, of volume.ID, most int) (page []Snapshot, next volume.ID) {
	if after == (volume.ID{}) {
		after = volume.FirstSnapshot()
	}
	var all []volume.ID
	for _, p := range s.pools {
		for id := range p.ledger.EachAfter(after, ledger.Card.Exists) {
			all = append(all, id)
		}
	}
	slices.SortFunc(all, volume.ID.Compare)
	for _, id := range slices.Compact(all) {
		found, err := s.FindSnapshot(ctx, id)
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
