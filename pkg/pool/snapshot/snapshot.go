// Package snapshot decides how volumes and snapshots are copied within a pool: what can be a source
// and is kept from going away meanwhile, what a copy may hold and promises, and how consistent it
// is. Where entries lie on disk, and in which order they come to be, is that of volumes; locks are
// up to pkg/pool.
package snapshot

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/freezer"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Pool is one whose directories of this node are open: see store.OpenWork.
type Pool struct {
	*reconcile.Pool
	Entries Entries
	Limits  limit.Options
	Pins    *Pins
	Freezer Freezer
}

// Freezer stops all processes of pods until thaw, as freezer.Client does. The context ends if they
// go on before.
type Freezer interface {
	Freeze(ctx context.Context, pods []freezer.Pod) (still context.Context, thaw func() error, err error)
}

// Entries are those of the pool, volumes and snapshots, as calls make and use them.
type Entries interface {
	// Written reports whether pods or devices of this node may write to an entry.
	Written(id volume.ID, e store.Entry, d *dir.Dir) (bool, error)
	// LockSource keeps a source from being published, deleted and grown. Errors: ErrBusy.
	LockSource(id volume.ID) (unlock func(), err error)
	// PublishedAt are the paths at which an entry, or what is inside it, is mounted on this node.
	PublishedAt(id volume.ID, e store.Entry, d *dir.Dir) ([]string, error)
	// Limited makes the directory of a new entry in creating/, and notes in its record who
	// enforces its size.
	Limited(ctx context.Context, rec *store.Record) func(creating *dir.Dir) (*dir.Dir, error)
	// Build makes an entry aside and then puts it in its place in one step.
	Build(ctx context.Context, rec *store.Record, makeDir func(*dir.Dir) (*dir.Dir, error), fill func(*dir.Dir) error) error
	// Undo removes what a failed Build left.
	Undo(id volume.ID)
}

// A Request is for a new snapshot.
type Request struct {
	// ID is one that volume.ParseSnapshot made.
	ID     volume.ID
	Source volume.ID
	Way    Way
}

// A Way is how to copy an entry, which pods may use.
type Way struct {
	// WhenWritten says what to do with a directory that is written to meanwhile.
	WhenWritten volume.WhenWritten
	// MaxStall is for how long writers may be stopped; 0 for no limit.
	MaxStall time.Duration
	// Shared refuses a copy that would share no blocks with its source.
	Shared bool
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
	// Upstream: it is of the upstream KubeVirt driver, in a snapshotPath.
	Upstream bool
}

// Existing answers a repeated call.
func (p *Pool) Existing(r Request, e store.Entry) (Snapshot, error) {
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
	return p.Describe(r.ID, e), p.Store.Creating().SyncParent(r.ID)
}

// Describe is what is reported of a snapshot that has a record.
func (p *Pool) Describe(id volume.ID, e store.Entry) Snapshot {
	return Snapshot{
		ID: id, Pool: p.Config.Name, Mode: e.Record.Mode, Origin: *e.Record.Origin, Promised: e.Record.Bytes, Lost: e.Lost(),
	}
}

// Make makes a snapshot of a source, which is open.
func (p *Pool) Make(ctx context.Context, r Request, src *Source) (Snapshot, error) {
	if err := p.Limits.MustNotServe(p.Enforcer); err != nil {
		return Snapshot{}, reconcile.Unavailable(p.Config, err)
	}
	space, err := p.Store.Space()
	if err != nil {
		return Snapshot{}, err
	}
	if space.ReadOnly {
		return Snapshot{}, reconcile.Unavailable(p.Config, syscall.EROFS)
	}
	bytes, err := src.mostHeld(space)
	if err != nil {
		return Snapshot{}, err
	}
	held, err := p.Ledger.Reserve(space, bytes)
	if err != nil {
		return Snapshot{}, p.NotPossible(err)
	}
	defer func() {
		if held.Held() { // until what is left counts as trash
			p.Entries.Undo(r.ID)
			held.Release()
		}
	}()
	rec := store.NewRecord(r.ID, src.entry.Mode(), bytes)
	rec.Thin = src.entry.Record.Thin
	if err := p.Store.Creating().MakeParent(r.ID); err != nil {
		return Snapshot{}, p.NotPossible(err)
	}
	if err := src.Begin(rec); err != nil {
		return Snapshot{}, p.NotPossible(err)
	}
	if err := p.Entries.Build(ctx, rec, src.Make(ctx, rec), p.cut(ctx, src, rec)); err != nil {
		return Snapshot{}, p.NotPossible(refused(err))
	}
	name, _ := r.ID.Snapshot()
	p.Log.Info("Made a snapshot", "snapshot", name, "volume", r.Source.String(), "method", rec.Origin.Method, "consistency", rec.Origin.Consistency,
		"took", millis(rec.Origin.TookMillis).String(), "stalled", millis(rec.Origin.StallMillis).String())
	e := store.Entry{Record: rec, Present: true}
	held.Commit(r.ID, reconcile.CardOf(e))
	return p.Describe(r.ID, e), nil
}

// NotPossible is ErrPrecondition for a snapshot that does not fit: after RESOURCE_EXHAUSTED
// csi-snapshotter takes a snapshot for one that may still be made, and never lets go of it.
// docs/decisions/0031-snapshots.md has the reasons. Of a filesystem that has become read-only it is ErrUnavailable.
func (p *Pool) NotPossible(err error) error {
	if errors.Is(err, syscall.EROFS) {
		return reconcile.Unavailable(p.Config, err)
	}
	if err = limit.NoSpace(err); errors.Is(err, volume.ErrNoSpace) {
		return fmt.Errorf("%w: %v", volume.ErrPrecondition, err)
	}
	return err
}

// millis is a number of milliseconds of a record.
func millis(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// Count has btrfs count what a directory holds, which it does when it commits. That waits for all that others have written: so it comes before
// the lock of the source. What is written after it is as what is written while the source is copied.
func (p *Pool) Count(source volume.ID) error {
	if p.Enforcer.Kind() != quota.Btrfs || p.Ledger.Known(source).Is(ledger.IsBlock) {
		return nil
	}
	return clone.Sync(p.Store.Root())
}

// mostHeld is what a copy of the source may hold, in bytes: what the source does and a
// little more, where that is counted, or else all that it was promised.
func (s *Source) mostHeld(space dir.Space) (int64, error) {
	c, promised := reconcile.CardOf(s.entry), s.bytes()
	if s.entry.Block() || !s.pool.Enforcer.Enforces(c) {
		return promised, nil
	}
	usage, err := s.pool.Enforcer.Accounting.Usage(s.dir, c)
	if err != nil {
		return 0, err
	}
	outside, err := s.pool.Enforcer.Accounting.Outside(s.dir)
	if err != nil {
		return 0, err
	}
	if outside > 0 { // what is in them does not count for the source
		usage.Bytes = max(usage.Bytes, promised)
	}
	return inBlocks(s.pool.copyOf(usage)+ledger.OfInodes(s.pool.Enforcer.Kind(), usage.Inodes, s.pool.Enforcer.Sizes.InodeBytes()), space.BlockBytes), nil
}

// copyOf is what a copy of so much may hold, in bytes.
func (p *Pool) copyOf(u quota.Usage) int64 {
	bytes := u.Bytes + u.Bytes/16 + 1<<20
	if p.Enforcer.Kind() == quota.Ext4 {
		// The blocks of its directories, which were full, may be half empty in a copy.
		bytes += u.Inodes * longestName
	}
	return bytes
}

// longestName is what a name takes in a directory of ext4 at most, in bytes.
const longestName = 264

func inBlocks(bytes, block int64) int64 { return (bytes + block - 1) / block * block }

// cut copies the source, notes in the record what came of that, and lowers the promise to what
// the copy holds: it cannot grow.
func (p *Pool) cut(ctx context.Context, src *Source, rec *store.Record) func(*dir.Dir) error {
	return func(d *dir.Dir) error {
		if err := src.fill(ctx, d, rec.Origin); err != nil {
			return err
		}
		if rec.Origin.Consistency == volume.Unverified && src.way.WhenWritten != volume.Accept {
			return errUnstill
		}
		held, err := p.heldBy(d, rec)
		// The extents that the file keeps, but no more than its size: what it kept above that is foreign use already.
		held = max(held, min(src.held, src.bytes()))
		if err != nil {
			return err
		}
		if held > rec.Bytes && src.mayExceed() {
			return fmt.Errorf("%w: %d bytes were set aside for it, and %d are in it: pods have written more meanwhile, or in subvolumes that do not count", volume.ErrPrecondition, rec.Bytes, held)
		}
		rec.Bytes = min(rec.Bytes, held)
		return p.Enforcer.Apply(d, reconcile.CardOf(store.Entry{Record: rec}))
	}
}

// heldBy is what a copy holds, in bytes, where that is known, or else what is promised to it.
func (p *Pool) heldBy(d *dir.Dir, rec *store.Record) (int64, error) {
	c := reconcile.CardOf(store.Entry{Record: rec})
	switch {
	case rec.Mode == volume.ModeBlock:
		id, err := volume.ParseEntry(rec.ID)
		if err != nil {
			return 0, err
		}
		return content.Allocated(id, d)
	case !p.Enforcer.Enforces(c):
		return rec.Bytes, nil
	}
	usage, err := p.Enforcer.Accounting.Usage(d, c)
	return usage.Bytes + ledger.OfInodes(p.Enforcer.Kind(), usage.Inodes, p.Enforcer.Sizes.InodeBytes()), err
}
