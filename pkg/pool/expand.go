package pool

import (
	"context"
	"errors"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Expand raises the size of a published volume while it is in use, and returns its
// size. A volume that is large enough already stays as it is. The caller holds the
// volume's lock; the mode may be empty, for either. Errors: ErrInvalid, ErrNotFound,
// ErrOutOfRange for less than the volume has, ErrCannotGrow for more than the pool can
// promise or its filesystem has, ErrUnavailable, ErrDamagedRecord, ErrLost, ErrIO,
// ErrAmbiguous.
func (s *Set) Expand(ctx context.Context, id volume.ID, at bind.Target, mode volume.Mode, r volume.Range) (int64, error) {
	if err := r.Check(); err != nil {
		return 0, err
	}
	v, err := s.find(ctx, id, volume.PoolName{})
	if err != nil {
		return 0, err
	}
	defer v.close()
	if err := v.entry.Usable(); err != nil {
		return 0, fmt.Errorf("%s: %w", id.Named(), err)
	}
	err = v.entry.Unmoved()
	if err == nil && mode != "" {
		err = v.entry.UsedAs(mode)
	}
	if err == nil {
		err = v.use().CheckPublished(at)
	}
	if err != nil {
		return 0, fmt.Errorf("expand volume %s: %w", id, err)
	}
	bytes, err := growth{v}.expand(ctx, r)
	if err != nil {
		return 0, fmt.Errorf("expand volume %s: %w", id, err)
	}
	return bytes, nil
}

// A growth is that of a volume. The caller holds the volume's lock.
type growth struct{ *found }

// expand promises what is asked for, and makes the volume that large.
func (v growth) expand(ctx context.Context, r volume.Range) (int64, error) {
	unlock, err := v.visit.LockToPromise(ctx, v.id)
	if err != nil {
		return 0, err
	}
	defer unlock()
	space, err := v.readToPromise()
	if err != nil {
		return 0, err
	}
	has := v.visit.View().Volume(v.id, reconcile.InfoOf(v.entry), space).Bytes
	if r.Limit > 0 && r.Limit < has {
		return 0, fmt.Errorf("%w: it has %d bytes, and volumes do not shrink", volume.ErrOutOfRange, has)
	}
	if r.Required <= has {
		return has, errors.Join(v.durable(), restoreIfCounted(v.found), v.use().GrowDevices())
	}
	bytes, err := v.largerSize(r, space)
	if err == nil {
		err = errors.Join(ctx.Err(), v.visit.Pool.OthersAreRead(), v.fileMayGrow(), mayGrow(v.found))
	}
	if err != nil {
		return 0, err
	}
	held, err := v.visit.Pool.Ledger.Reserve(space, v.grownBy(bytes))
	if err == nil {
		defer held.Release()
		err = v.grow(ctx, bytes, held)
	}
	if errors.Is(err, volume.ErrNoSpace) {
		err = fmt.Errorf("%w: %w", volume.ErrCannotGrow, err)
	}
	return bytes, err
}

// readToPromise reads what a promise goes by: the promises of other nodes, the volume, and the space.
func (v growth) readToPromise() (dir.Space, error) {
	if err := v.visit.View().Index().LoadShared(); err != nil {
		return dir.Space{}, err
	}
	if err := v.rereadUsable(); err != nil {
		return dir.Space{}, err
	}
	return v.visit.Store.Space()
}

// largerSize is the size to promise to a volume that has less than is asked for. Errors: ErrCannotGrow, ErrOutOfRange.
func (v growth) largerSize(r volume.Range, space dir.Space) (int64, error) {
	record := v.entry.Record
	switch {
	case record == nil:
		return 0, fmt.Errorf("%w: it has no record of its size and can use the whole pool", volume.ErrCannotGrow)
	case record.Quota != "" && !v.visit.Enforcer.Enforces(reconcile.InfoOf(v.entry)):
		return 0, fmt.Errorf("%w: the volume was made under a limit of %s, which the pool cannot change as it is mounted and configured now",
			volume.ErrCannotGrow, record.Quota)
	case space.ReadOnly:
		return 0, fmt.Errorf("%w: pool %q is read-only", volume.ErrCannotGrow, v.visit.Pool.Config.Name)
	}
	bytes, err := r.Promise(unit(v.entry.Mode(), space))
	if err != nil && r.Limit == 0 {
		return 0, fmt.Errorf("%w: %v", volume.ErrCannotGrow, err)
	}
	if err != nil {
		return 0, err
	}
	return v.grownTo(bytes, r)
}

// mayGrow returns ErrCannotGrow for a directory that its limit does not count, as one that came from a backup.
func mayGrow(v *found) error {
	counted, err := v.visit.Enforcer.Counts(v.dir, reconcile.InfoOf(v.entry))
	if err == nil && !counted {
		err = fmt.Errorf("%w: its directory is not counted as its record says, as after a restore from a backup: docs/layout.md says what it needs", volume.ErrCannotGrow)
	}
	return err
}

// restoreIfCounted makes a repeated call finish what the first had left, unless the limit could not hold.
func restoreIfCounted(v *found) error {
	counted, err := v.visit.Enforcer.Counts(v.dir, reconcile.InfoOf(v.entry))
	if err != nil || !counted {
		return err
	}
	return restoreIfLimited(v.visit, v.id, v.entry)
}

// fileMayGrow returns ErrBusy for a block volume that is being copied.
func (v growth) fileMayGrow() error {
	if !v.entry.Block() {
		return nil
	}
	return v.visit.Pool.Node.Pins.Free(v.id)
}

// grownTo is the size to promise where a growth was interrupted: that of the file,
// which is larger than its record then, and never shrinks.
func (v growth) grownTo(bytes int64, r volume.Range) (int64, error) {
	if !v.entry.Block() {
		return bytes, nil
	}
	disk, err := content.OpenFile(v.id, v.dir)
	if err != nil {
		return 0, err
	}
	has, err := disk.Size()
	if err := errors.Join(err, disk.Close()); err != nil || has <= bytes {
		return bytes, err
	}
	if r.Limit > 0 && has > r.Limit {
		return 0, fmt.Errorf("%w: its file has %d bytes already, from a growth that was interrupted, and never shrinks", volume.ErrOutOfRange, has)
	}
	return has, nil
}

// grownBy is what the volume takes more of the pool at a size, in bytes.
func (v growth) grownBy(bytes int64) int64 {
	grown := *v.entry.Record
	grown.Bytes = bytes
	l := v.visit.Pool.Ledger
	return l.Owed(reconcile.InfoOf(store.Entry{Record: &grown})) - l.Owed(reconcile.InfoOf(v.entry))
}

// grow writes the new promise and then lets the kernel enforce it. After a crash in
// between, start-up raises the limit to the record. The file of a block volume comes
// first, for it may not fit; start-up raises the record to a file that is larger.
func (v growth) grow(ctx context.Context, bytes int64, held *ledger.Reservation) error {
	s := v.visit
	grown := *v.entry.Record
	grown.Bytes = bytes
	e := store.Entry{Record: &grown, Present: true}
	var had int64 // what the file of a block volume had
	if v.entry.Block() {
		var err error
		step := trace.Begin(ctx, "make the file larger")
		had, err = v.growContent(ctx, e)
		if step.EndWith(err) != nil {
			return limit.NoSpace(err)
		}
	}
	if err := trace.Step(ctx, "write the record", func() error { return s.Store.Records().Write(&grown) }); err != nil {
		if rereadErr := v.rereadUsable(); rereadErr != nil {
			// Which record there is now is not known. A file that is too large does no harm.
			return errors.Join(limit.NoSpace(err), rereadErr)
		}
		return errors.Join(limit.NoSpace(err), v.cutFile(had))
	}
	held.Commit(v.id, reconcile.InfoOf(e))
	if v.entry.Block() {
		return trace.Step(ctx, "make the devices larger", v.use().GrowDevices)
	}
	return trace.Step(ctx, "set the limit", func() error { return s.Enforcer.Apply(v.dir, reconcile.InfoOf(e)) })
}

// growContent makes the content of a volume larger, and its limit before that, and returns the
// size that it had. What of it fails changes nothing.
func (v growth) growContent(ctx context.Context, to store.Entry) (had int64, err error) {
	enforcer := v.visit.Enforcer
	if had, err = content.FileBytes(v.id, v.dir); err != nil {
		return 0, err
	}
	if err = enforcer.Apply(v.dir, reconcile.InfoOf(to)); err == nil {
		err = v.visit.View().Content(v.id, v.entry.Record).Grow(ctx, v.dir, to.Record.Bytes)
	}
	if err != nil {
		return 0, errors.Join(err, enforcer.Apply(v.dir, reconcile.InfoOf(v.entry)))
	}
	return had, nil
}

// cutFile undoes growContent where the record was not written.
func (v growth) cutFile(had int64) error {
	if !v.entry.Block() || v.entry.Record.Bytes > had {
		return nil
	}
	return errors.Join(v.visit.View().Disk(v.id, v.entry.Record).Cut(v.dir, had), v.visit.Enforcer.Apply(v.dir, reconcile.InfoOf(v.entry)))
}

// rereadUsable reads the volume anew: another node may have changed it before this one had
// the lock, and a record whose writing failed may be there all the same.
func (v *found) rereadUsable() error {
	if err := v.reread(); err != nil {
		return err
	}
	return v.entry.Usable()
}

// restoreIfLimited makes a repeated call finish what the first had left.
func restoreIfLimited(in *serve.Visit, id volume.ID, e store.Entry) error {
	if c := reconcile.InfoOf(e); in.Enforcer.Enforces(c) {
		return in.Repair().Limit(id, c)
	}
	return nil
}
