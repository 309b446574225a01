package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A SnapshotRequest is for a new snapshot.
type SnapshotRequest struct {
	// ID is one that volume.ParseSnapshot made.
	ID     volume.ID
	Source volume.ID
	Way    CopyWay
}

// A CopyWay is how to copy an entry, which pods may use.
type CopyWay struct {
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
	made, err := s.made(ctx, r)
	if !errors.Is(err, volume.ErrNotFound) {
		return made, err
	}
	of, err := s.set.find(ctx, r.Source, volume.PoolName{})
	if err != nil {
		return Snapshot{}, err
	}
	of.close() // it is read again under its lock
	p := of.visit.Pool
	if err := elsewhere(s.set.holders(r.ID), r.ID, p); err != nil {
		return Snapshot{}, err
	}
	ctx, end := s.set.node.UntilClose(ctx)
	defer end()
	made, err = s.create(ctx, p, r)
	if err != nil {
		return Snapshot{}, fmt.Errorf("snapshot volume %s in pool %q: %w", r.Source, p.Config.Name, err)
	}
	return made, nil
}

// made answers a repeated call. The source may be gone by then.
func (s Snapshots) made(ctx context.Context, r SnapshotRequest) (Snapshot, error) {
	found, err := findIn(ctx, s.set.holders(r.ID), r.ID)
	if err != nil {
		return Snapshot{}, err
	}
	defer found.close()
	return existingSnapshot(found.visit, r, found.entry)
}

func (s Snapshots) create(ctx context.Context, p *serve.Pool, r SnapshotRequest) (Snapshot, error) {
	in, err := p.Enter(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	defer in.Close()
	e, d, err := in.View().Lookup(r.ID)
	if d != nil {
		_ = d.Close()
	}
	if err != nil {
		return Snapshot{}, err
	}
	if p.Note(r.ID, e); e.Exists() {
		return existingSnapshot(in, r, e)
	}
	if err := p.OthersAreRead(); err != nil {
		return Snapshot{}, err
	}
	if err := in.Work(); err != nil {
		return Snapshot{}, notPossible(p, err)
	}
	if err := in.Discard().NoneLeft(r.ID); err != nil {
		return Snapshot{}, err
	}
	if err := countUse(in, r.Source); err != nil {
		return Snapshot{}, notPossible(p, err)
	}
	unlock, err := s.set.node.LockToPin(r.Source)
	if err != nil {
		return Snapshot{}, err
	}
	src, err := openSource(in, r.Source, r.Way, unlock)
	if err != nil {
		return Snapshot{}, notPossible(p, err)
	}
	defer src.close()
	defer in.Making()()
	return makeSnapshot(ctx, in, r, src)
}

// existingSnapshot answers a repeated call.
func existingSnapshot(in *serve.Visit, r SnapshotRequest, e store.Entry) (Snapshot, error) {
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
	return describeSnapshot(in.Pool, r.ID, e), in.Store.Creating().SyncParent(r.ID)
}

// describeSnapshot is what is reported of a snapshot that has a record.
func describeSnapshot(p *serve.Pool, id volume.ID, e store.Entry) Snapshot {
	return Snapshot{
		ID: id, Pool: p.Config.Name, Mode: e.Record.Mode, Origin: *e.Record.Origin, Promised: e.Record.Bytes, Lost: e.Lost(),
	}
}

// makeSnapshot makes a snapshot of a source, which is open.
func makeSnapshot(ctx context.Context, in *serve.Visit, r SnapshotRequest, src *source) (Snapshot, error) {
	if err := in.Pool.Limits().MustNotServe(in.Enforcer); err != nil {
		return Snapshot{}, in.Pool.Unavailable(err)
	}
	space, err := in.Store.Space()
	if err != nil {
		return Snapshot{}, err
	}
	if space.ReadOnly {
		return Snapshot{}, in.Pool.Unavailable(syscall.EROFS)
	}
	bytes, err := src.mostHeld(space)
	if err != nil {
		return Snapshot{}, err
	}
	rec := store.NewRecord(r.ID, src.entry.Mode(), bytes)
	rec.Thin = src.entry.Record.Thin
	owed := in.Pool.Ledger.Owed(reconcile.InfoOf(store.Entry{Record: rec}))
	err = makeReserved(in, rec, space, owed, func() error {
		if err := in.Store.Creating().MakeParent(r.ID); err != nil {
			return err
		}
		if err := src.begin(ctx, rec); err != nil {
			return err
		}
		return refused(build(ctx, in, rec, src.makeDir(ctx, rec), src.cut(ctx, rec)))
	})
	if err != nil {
		return Snapshot{}, notPossible(in.Pool, err)
	}
	name, _ := r.ID.Snapshot()
	in.Pool.Log.Info("Made a snapshot", "snapshot", name, "volume", r.Source.String(), "method", rec.Origin.Method, "consistency", rec.Origin.Consistency,
		"took", millis(rec.Origin.TookMillis).String(), "stalled", millis(rec.Origin.StallMillis).String())
	return describeSnapshot(in.Pool, r.ID, store.Entry{Record: rec, Present: true}), nil
}

// notPossible is ErrPrecondition for a snapshot that does not fit: after RESOURCE_EXHAUSTED
// csi-snapshotter takes a snapshot for one that may still be made, and never lets go of it.
// docs/decisions/0031-snapshots.md has the reasons. Of a filesystem that has become read-only it is ErrUnavailable.
func notPossible(p *serve.Pool, err error) error {
	if errors.Is(err, syscall.EROFS) {
		return p.Unavailable(err)
	}
	if err = limit.NoSpace(err); errors.Is(err, volume.ErrNoSpace) {
		return fmt.Errorf("%w: %v", volume.ErrPrecondition, err)
	}
	return err
}

// millis is a number of milliseconds of a record.
func millis(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// countUse has btrfs count what a directory holds, which it does when it commits. That waits for all that others have written: so it comes before
// the lock of the source. What is written after it is as what is written while the source is copied.
func countUse(in *serve.Visit, source volume.ID) error {
	if in.Enforcer.Kind() != quota.Btrfs || in.Pool.Ledger.Known(source).Is(ledger.IsBlock) {
		return nil
	}
	return clone.Sync(in.Store.Root())
}

// mostHeld is what a copy of the source may hold, in bytes: what the source does and a
// little more, where that is counted, or else all that it was promised.
func (s *source) mostHeld(space dir.Space) (int64, error) {
	c, promised := reconcile.InfoOf(s.entry), s.bytes()
	if s.entry.Block() || !s.in.Enforcer.Enforces(c) {
		return promised, nil
	}
	usage, err := s.in.Enforcer.Settled(s.dir, c)
	if err != nil {
		return 0, err
	}
	outside, err := s.in.Enforcer.Outside(s.dir)
	if err != nil {
		return 0, err
	}
	if outside > 0 { // what is in them does not count for the source
		usage.Bytes = max(usage.Bytes, promised)
	}
	return inBlocks(copyOf(s.in.Enforcer, usage)+ledger.OfInodes(s.in.Enforcer.Kind(), usage.Inodes, s.in.Enforcer.Sizes.Costs().InodeBytes), space.BlockBytes), nil
}

// copyOf is what a copy of so much may hold, in bytes.
func copyOf(enforcer *limit.Enforcer, u quota.Usage) int64 {
	bytes := u.Bytes + u.Bytes/16 + 1<<20
	if enforcer.Kind() == quota.Ext4 {
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
func (s *source) cut(ctx context.Context, rec *store.Record) func(*dir.Dir) error {
	return func(d *dir.Dir) error {
		if err := s.fill(ctx, d, rec.Origin); err != nil {
			return err
		}
		if rec.Origin.Consistency == volume.Unverified && s.way.WhenWritten != volume.Accept {
			return errUnstill
		}
		held, err := heldBy(s.in.Enforcer, d, rec)
		// The extents that the file keeps, but no more than its size: what it kept above that is foreign use already.
		held = max(held, min(s.held, s.bytes()))
		if err != nil {
			return err
		}
		if held > rec.Bytes && s.mayExceed() {
			return fmt.Errorf("%w: %d bytes were set aside for it, and %d are in it: pods have written more meanwhile, or in subvolumes that do not count", volume.ErrPrecondition, rec.Bytes, held)
		}
		rec.Bytes = min(rec.Bytes, held)
		return s.in.Enforcer.Apply(d, reconcile.InfoOf(store.Entry{Record: rec}))
	}
}

// heldBy is what a copy holds, in bytes, where that is known, or else what is promised to it.
func heldBy(enforcer *limit.Enforcer, d *dir.Dir, rec *store.Record) (int64, error) {
	c := reconcile.InfoOf(store.Entry{Record: rec})
	switch {
	case rec.Mode == volume.ModeBlock:
		id, err := volume.ParseEntry(rec.ID)
		if err != nil {
			return 0, err
		}
		return content.Allocated(id, d)
	case !enforcer.Enforces(c):
		return rec.Bytes, nil
	}
	usage, err := enforcer.Settled(d, c)
	return usage.Bytes + ledger.OfInodes(enforcer.Kind(), usage.Inodes, enforcer.Sizes.Costs().InodeBytes), err
}

// Delete removes a snapshot, or returns ErrNotFound. When it returns the snapshot is
// gone durably; its content goes later. The caller holds the lock of its id. Errors: ErrBusy
// while a volume is made from it.
func (s Snapshots) Delete(ctx context.Context, id volume.ID) error {
	in, err := s.set.find(ctx, id, volume.PoolName{})
	if errors.Is(err, volume.ErrNotFound) {
		err = cmp.Or(keepRemoved(ctx, s.set.node, id), err)
	}
	if err != nil {
		return unlessOutOfUse(s.set.node, id, err)
	}
	defer in.close()
	if err := s.set.node.Pins.Free(id); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	err = trace.Step(ctx, "move to the trash", func() error { return remove(in.visit, id, in.entry) })
	if errors.Is(err, syscall.EROFS) {
		err = in.visit.Pool.Unavailable(err)
	}
	if err != nil {
		return fmt.Errorf("delete %s: %w", id.Named(), err)
	}
	return nil
}

// Find reports on one snapshot. Errors: ErrNotFound, ErrUnavailable, ErrDamagedRecord.
func (s Snapshots) Find(ctx context.Context, id volume.ID) (Snapshot, error) {
	in, err := s.set.findSettled(ctx, id)
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
	return describeSnapshot(in.visit.Pool, id, in.entry), nil
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
	for _, p := range s.set.node.Pools {
		for id := range p.Ledger.EachAfter(after, ledger.Info.Exists) {
			all = append(all, id)
		}
		for _, id := range upstreamSnapshots(ctx, p) {
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

// freeze stops the pods that have the source published, for no longer than is allowed.
func (s *source) freeze(ctx context.Context) (still context.Context, thaw func() error, err error) {
	pods, err := s.pods()
	if err != nil {
		return nil, nil, err
	}
	unchanged := func() error {
		now, err := s.pods()
		return errors.Join(err, noOthers(now, pods))
	}
	if len(pods) == 0 {
		return ctx, unchanged, nil
	}
	limit := s.way.frozenAtMost()
	limited, cancel := context.WithTimeoutCause(ctx, limit, errTooLong)
	still, thawed, err := s.in.Pool.Options.Freezer.Freeze(limited, pods)
	if err != nil {
		cancel()
		return nil, nil, err
	}
	return still, func() error {
		defer cancel()
		err := thawed()
		if errors.Is(context.Cause(limited), errTooLong) {
			return fmt.Errorf("%w: %s", errTooLong, limit)
		}
		return errors.Join(err, unchanged())
	}, nil
}

// noOthers returns ErrPrecondition if another pod than those that were stopped has the source now. It did not stand still, and what it has written
// through a mapping may not show.
func noOthers(now, stopped []freezer.Pod) error {
	for _, pod := range now {
		if !slices.Contains(stopped, pod) {
			return fmt.Errorf("%w: pod %s got it while the others were being frozen", volume.ErrPrecondition, pod)
		}
	}
	return nil
}

// frozenAtMost is for how long pods may be frozen.
func (w CopyWay) frozenAtMost() time.Duration {
	if w.MaxStall > 0 {
		return min(freezer.Limit, w.MaxStall)
	}
	return freezer.Limit
}

// errTooLong reports a copy that takes longer than pods may be frozen.
var errTooLong = errors.New("what changed could not be copied within the time for which pods may be frozen")

// pods are those that have the source published, by the mount table.
func (s *source) pods() ([]freezer.Pod, error) {
	published, err := s.in.Use(s.id, s.entry, s.dir).Published()
	if err != nil {
		return nil, err
	}
	var pods []freezer.Pod
	for _, at := range published {
		pod, ok := freezer.PodAt(at.Path)
		if !ok {
			return nil, fmt.Errorf("%w: it is published at %s, which is not in the directory of a pod: the driver cannot determine which pod to freeze", volume.ErrPrecondition, at.Path)
		}
		pods = append(pods, pod)
	}
	slices.SortFunc(pods, func(a, b freezer.Pod) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(pods), nil
}

// refused turns the reasons against a copy of what others use into errors of the domain.
func refused(err error) error {
	switch {
	case errors.Is(err, freezer.ErrBusy):
		return fmt.Errorf("%w: a pod that uses it is frozen: %w", volume.ErrBusy, err)
	case errors.Is(err, freezer.ErrUnavailable):
		return fmt.Errorf("%w: the class asks for consistency: freeze, which needs the component deploy/csi/freeze: %w", volume.ErrPrecondition, err)
	case errors.Is(err, freezer.ErrThawed), errors.Is(err, freezer.ErrUnstoppable), errors.Is(err, errTooLong):
		return fmt.Errorf("%w: %w", volume.ErrPrecondition, err)
	case errors.Is(err, clone.ErrTooMany):
		return fmt.Errorf("%w: %w, longer than pods may be frozen: they were not", volume.ErrPrecondition, err)
	case errors.Is(err, clone.ErrLeased):
		return fmt.Errorf("%w: %w: have the process end its lease, or the pod", volume.ErrPrecondition, err)
	case errors.Is(err, clone.ErrMounted):
		return fmt.Errorf("%w: %w: unmount it, or the copy would lack what is below", volume.ErrPrecondition, err)
	case errors.Is(err, clone.ErrFuture):
		return fmt.Errorf("%w: %w, so that no change of it would be found out before that: unpublish the volume, or have the file take the ctime of now (touch -c -h -a)", volume.ErrPrecondition, err)
	case errors.Is(err, syscall.EDQUOT): // no other node could do better
		return fmt.Errorf("%w: a copy takes more than is counted of the original, whose files are compressed or share blocks, or which grew meanwhile: %v", volume.ErrPrecondition, err)
	case errors.Is(err, dir.ErrMoved):
		return fmt.Errorf("%w: %w", volume.ErrPrecondition, err)
	case uncopyable(err) != "":
		return fmt.Errorf("%w: %s: %w", volume.ErrPrecondition, uncopyable(err), err)
	case errors.Is(err, clone.ErrFragmented):
		return fmt.Errorf("%w: %w, longer than maxStall of the VolumeSnapshotClass allows: have the file rewritten "+
			"(xfs_fsr, btrfs filesystem defragment), or choose a class with a larger maxStall", volume.ErrPrecondition, err)
	}
	return err
}

// uncopyable is why a file can never be copied as its user has made it; empty for another error.
func uncopyable(err error) string {
	switch {
	case errors.Is(err, syscall.E2BIG):
		return "the names of its extended attributes are more than the kernel lists (64 KiB)"
	case errors.Is(err, syscall.EMLINK):
		return "a file has as many hard links as its filesystem allows, and a copy takes one more meanwhile"
	case errors.Is(err, clone.ErrEncrypted):
		return "it has files or directories that its user has encrypted"
	}
	return ""
}
