package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A source is a volume or a snapshot whose content is copied, kept from going away meanwhile.
type source struct {
	in     *serve.Visit
	id     volume.ID
	entry  store.Entry
	dir    *dir.Dir
	method volume.CopyMethod
	way    CopyWay
	// inUse: pods or devices may write to it.
	inUse bool
	// fixed: it is a snapshot of this driver, which does not change.
	fixed   bool
	held    int64 // what the file of a block volume keeps, where that is counted: see measure
	file    int64 // the size of that file in bytes, which may be more than was recorded of a growth; 0 of a directory
	release func()
}

// openSource finds a source in the pool and decides how to copy it. It takes over the source's lock,
// and has that until begin, or close.
func openSource(in *serve.Visit, id volume.ID, way CopyWay, unlock func()) (_ *source, err error) {
	src := &source{in: in, id: id, way: way, fixed: id.IsSnapshot(), release: unlock}
	defer func() {
		if err != nil {
			src.close()
		}
	}()
	if src.entry, src.dir, err = in.View().Lookup(id); err != nil {
		return nil, err
	}
	if err := cmp.Or(src.entry.Usable(), src.entry.Unmoved()); err != nil {
		return nil, fmt.Errorf("%s: %w", id.Named(), err)
	}
	in.Pool.Note(id, src.entry) // a record whose writing failed may be there all the same
	if err := src.copyable(); err != nil {
		return nil, err
	}
	if src.inUse, err = src.written(); err != nil {
		return nil, err
	}
	if src.method, err = src.chooseMethod(); err != nil {
		return nil, err
	}
	if way.Shared && src.method == volume.ByCopy {
		return nil, fmt.Errorf("%w: a copy of %s would share no blocks with it", volume.ErrPrecondition, id.Named())
	}
	if err := src.freezable(); err != nil {
		return nil, err
	}
	if src.exclusive() && src.inUse {
		return nil, usedError(src)
	}
	if err := unlimit(src); err != nil {
		return nil, err
	}
	return src, nil
}

// usedError is the answer for a published source that has to be read while no pod writes to it.
func usedError(s *source) error {
	instead := "have its pods frozen (consistency: freeze)"
	if s.entry.Block() {
		instead = "on btrfs use a volume made while quotas are on (btrfs quota enable)"
	}
	return fmt.Errorf("%w: %s is published, and its copies share no blocks: unpublish it first, or %s", volume.ErrPrecondition, s.id.Named(), instead)
}

// unlimit takes off a limit that the kernel may keep of a source where quotas count as none: what shared blocks take would be charged to it.
func unlimit(s *source) error {
	if s.method == volume.ByCopy || s.in.Enforcer.Kind() != "" {
		return nil
	}
	return quota.Free(s.in.Store.Root(), s.dir)
}

// mayShare reports whether copies of a source may share its blocks. Where a file keeps more extents than its size, that has to be counted, of a
// block volume and of its copy: what they keep above their promises would be sold otherwise.
func mayShare(s *source) (bool, error) {
	enforcer := s.in.Enforcer
	if !s.entry.Block() || enforcer.Kind() == quota.Btrfs && enforcer.Unenforced() == nil && enforcer.Enforces(reconcile.InfoOf(s.entry)) {
		return true, nil
	}
	fs, err := dir.FilesystemOf(s.dir)
	return err == nil && !fs.KeepsExtents(), err
}

// keepsExtents reports whether a source is a block volume that shares its blocks on btrfs, which counts what its file keeps.
func keepsExtents(s *source) bool {
	return s.entry.Block() && !s.fixed && s.method != volume.ByCopy && s.in.Enforcer.Kind() == quota.Btrfs
}

// measure finds out what the file of a block volume keeps on a btrfs that counts it, and returns ErrPrecondition if it is so much
// that a promised write could fail after a copy. Btrfs keeps an extent until all of it is overwritten or discarded, in the copy
// too. Each block that is shared is written elsewhere once, and after that in its place, as the file is not
// copied on write: so what the file keeps grows by its size at most until blocks are shared again. It may grow twice: from now until the
// copy, which first has what its devices have in memory written to it, and after that. Once more it may where it was discarded before.
func (s *source) measure() error {
	enforcer, c := s.in.Enforcer, reconcile.InfoOf(s.entry)
	if err := clone.Sync(s.dir); err != nil { // which has the kernel count
		return err
	}
	usage, err := enforcer.Settled(s.dir, c)
	if err != nil {
		return err
	}
	s.held = usage.Bytes
	sharing := *s.entry.Record
	sharing.Family = sharing.UID
	room := enforcer.Sizes.Limit(reconcile.InfoOf(store.Entry{Record: &sharing})).Bytes - s.held
	if grows := 3 * (sharing.Bytes + sharing.Bytes/32); room < grows { // with what keeps track of its blocks
		return fmt.Errorf("%w: the file of %s keeps %d bytes on the disk for its size of %d, since btrfs keeps an extent until all of it is overwritten; "+
			"if its blocks were shared once more, writes to it could fail: copy its content into a new volume, with cp --reflink=never", volume.ErrPrecondition, s.id.Named(), s.held, sharing.Bytes)
	}
	return nil
}

// chooseMethod is how a source is copied: as a snapshot of a btrfs subvolume that has no other in it, by reference, or by reading it.
func (s *source) chooseMethod() (volume.CopyMethod, error) {
	if !s.entry.Block() && !s.standsStill() {
		// Subvolumes inside would be empty in the snapshot.
		inside, err := clone.Nested(s.dir)
		if err == nil && inside == 0 {
			return volume.BySubvolume, nil
		}
		if err != nil && !errors.Is(err, clone.ErrNotSupported) {
			return "", err
		}
	}
	if may, err := mayShare(s); err != nil || !may {
		return volume.ByCopy, err
	}
	// In the pool's directory: the source may be at its limit.
	can, err := s.in.Enforcer.Shares(func() (bool, error) { return clone.Supported(s.in.Store.Root()) })
	if err == nil && can {
		return volume.ByReference, nil
	}
	return volume.ByCopy, err
}

// standsStill reports whether pods are frozen while the source is copied. A snapshot of a subvolume would have them wait: it commits
// the filesystem, behind all that others have queued for its disk.
func (s *source) standsStill() bool {
	return !s.entry.Block() && s.inUse && s.way.WhenWritten == volume.Freeze
}

// limitedAfter reports whether a copy gets its limit when it is made: near that btrfs commits the filesystem for each few files.
func (s *source) limitedAfter() bool {
	return s.method == volume.ByReference && s.standsStill() && s.in.Enforcer.Kind() == quota.Btrfs
}

// mayExceed reports whether a copy may hold more than its limit: btrfs lets a subvolume share blocks beyond that.
func (s *source) mayExceed() bool {
	return s.method != volume.ByCopy && !s.entry.Block() && s.in.Enforcer.Kind() == quota.Btrfs
}

// foreignSource is a source that is no entry of the pool, but has the origin of a snapshot. It is read
// and written anew: so it shares nothing with what the ledger does not know. It takes over the directory and the lock.
func foreignSource(in *serve.Visit, id volume.ID, of volume.Origin, d *dir.Dir, unlock func()) (*source, error) {
	rec := store.NewRecord(id, volume.ModeMount, 0)
	rec.UID, rec.Origin = of.UID, &of
	src := &source{in: in, id: id, entry: store.Entry{Record: rec, Present: true}, dir: d, method: volume.ByCopy, release: unlock}
	if err := src.copyable(); err != nil {
		src.close()
		return nil, err
	}
	return src, nil
}

// freezable returns ErrPrecondition for a directory that is to be copied while its pods are frozen, on a filesystem where it
// could not be found out what they change before that.
func (s *source) freezable() error {
	if s.fixed || s.entry.Block() || s.way.WhenWritten != volume.Freeze {
		return nil
	}
	if fs, err := dir.FilesystemOf(s.dir); err != nil || fs.NotesChanges() {
		return err
	}
	return fmt.Errorf("%w: the filesystem of pool %q is none of XFS, ext4 and btrfs, and may not note changes through memory mappings, so a copy could be torn although its pods are frozen: "+
		"choose a VolumeSnapshotClass with consistency: verify, and unpublish volume %s first", volume.ErrPrecondition, s.in.Pool.Config.Name, s.id)
}

// copyable returns ErrPrecondition for what no copy can be promised for.
func (s *source) copyable() error {
	switch {
	case s.in.Pool.Config.Shared:
		return fmt.Errorf("%w: pool %q is shared between nodes, where snapshots and clones are not supported", volume.ErrPrecondition, s.in.Pool.Config.Name)
	case s.entry.Record == nil:
		return fmt.Errorf("%w: volume %s has no record of its size, so a copy of it would have none", volume.ErrPrecondition, s.id)
	case s.entry.Inline():
		return fmt.Errorf("%w: volume %s is an inline volume, which is deleted with its pod", volume.ErrPrecondition, s.id)
	}
	if !s.entry.Block() {
		return s.in.View().Content(s.id, s.entry.Record).Check(s.dir)
	}
	disk := s.in.View().Disk(s.id, s.entry.Record)
	disk.Bytes = s.bytes() // a snapshot is promised what it holds, which may be less
	if err := disk.Check(s.dir); err != nil {
		return err
	}
	var err error
	s.file, err = content.FileBytes(s.id, s.dir)
	return err
}

// written reports whether a pod or a device may write to the source. A snapshot is never published.
func (s *source) written() (bool, error) {
	if s.id.IsSnapshot() {
		return false, nil
	}
	return s.in.Use(s.id, s.entry, s.dir).Written()
}

// wasWritten reports whether a pod or a device may have written to the source at any time since it was opened.
func (s *source) wasWritten() (bool, error) {
	if s.inUse || s.in.Pool.Node.Pins.Used(s.id) {
		return true, nil
	}
	return s.written()
}

// exclusive reports whether no pod may write to the source while it is copied.
func (s *source) exclusive() bool {
	return s.method == volume.ByCopy && !s.id.IsSnapshot() && (s.way.WhenWritten != volume.Freeze || s.entry.Block())
}

// alone reports whether no pod may write to the source from now until close: then it is locked again.
func (s *source) alone() (bool, error) {
	if s.id.IsSnapshot() || s.exclusive() {
		return true, nil
	}
	unlock, err := s.in.Pool.Node.Lock(s.id)
	if errors.Is(err, volume.ErrBusy) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if written, err := s.written(); err != nil || written {
		unlock()
		return false, err
	}
	unpin := s.release
	s.release = func() { unpin(); unlock() }
	return true, nil
}

// close lets others use the source again.
func (s *source) close() {
	s.release()
	if s.dir != nil {
		_ = s.dir.Close() // opened for reading
	}
}

// bytes is the size that the source promises, or that its file has if that is more: its devices show all of that.
func (s *source) bytes() int64 {
	if s.id.IsSnapshot() {
		return max(s.entry.Record.Origin.Bytes, s.file)
	}
	return max(s.entry.Record.Bytes, s.file)
}

// begin notes in the record of a copy where it comes from, and lets others use the source again
// as far as that does no harm. The time of the cut and its consistency follow when it is made. What is measured is copied by one call after the
// other: two that have both measured it would share its blocks twice.
func (s *source) begin(ctx context.Context, rec *store.Record) error {
	rec.BlockBytes = s.entry.Record.BlockBytes
	rec.Origin = &volume.Origin{ID: s.id.String(), UID: s.entry.Record.UID, Bytes: s.bytes(), Method: s.method}
	if err := s.join(rec); err != nil {
		return err
	}
	// Pinned, it needs no lock: it can be published, unpublished and measured meanwhile. To what is read and written anew no pod may write.
	unlock := s.release
	s.release = s.in.Pool.Node.Pins.Pin(s.id, s.exclusive())
	unlock()
	if !keepsExtents(s) {
		return nil
	}
	done, err := s.in.Pool.Node.TurnToCopy(ctx, s.id)
	if err != nil {
		return err
	}
	unpin := s.release
	s.release = func() { done(); unpin() }
	return s.measure()
}

// join makes a record one of the family of the source, if they share blocks, and the source
// one of it. The source then has room to overwrite what it shares.
func (s *source) join(rec *store.Record) error {
	rec.Family = s.family()
	if rec.Family == "" {
		return nil
	}
	if rec.Family != s.entry.Record.Family {
		if err := s.startFamily(rec.Family); err != nil {
			return err
		}
	}
	// The call that founded the family may have failed after its record was written.
	return s.in.Enforcer.Ensure(s.dir, reconcile.InfoOf(s.entry))
}

// startFamily makes the source the first of a family.
func (s *source) startFamily(family string) error {
	sharing := *s.entry.Record
	sharing.Family = family
	joined := store.Entry{Record: &sharing, Present: s.entry.Present}
	space, err := s.in.Store.Space()
	if err != nil {
		return err
	}
	l := s.in.Pool.Ledger
	held, err := l.Reserve(space, l.Owed(reconcile.InfoOf(joined))-l.Owed(reconcile.InfoOf(s.entry)))
	if err != nil {
		return fmt.Errorf("room for %s to overwrite what it shares: %w", s.id.Named(), err)
	}
	defer held.Release()
	if err := s.in.Store.Records().Write(&sharing); err != nil {
		return err
	}
	s.entry = joined
	held.Commit(s.id, reconcile.InfoOf(joined))
	return nil
}

// family is the family of a copy; empty if it shares no blocks.
func (s *source) family() string {
	if s.method == volume.ByCopy {
		return ""
	}
	return cmp.Or(s.entry.Record.Family, s.entry.Record.UID)
}

// makeDir makes the directory of a copy in creating/, under its limit, unless it gets that later. A snapshot of a subvolume is
// complete with that.
func (s *source) makeDir(ctx context.Context, rec *store.Record) func(*dir.Dir) (*dir.Dir, error) {
	makeLimited := limited(ctx, s.in, rec)
	return func(creating *dir.Dir) (*dir.Dir, error) {
		if s.method != volume.BySubvolume {
			d, err := makeLimited(creating)
			if err != nil {
				return nil, err
			}
			if s.limitedAfter() {
				_, err = s.in.Enforcer.Lift(creating, rec.ID, rec.UID)
			} else {
				err = s.in.Enforcer.ApplyWhileCopied(d, reconcile.InfoOf(store.Entry{Record: rec}), clone.Inodes)
			}
			if err != nil {
				return nil, errors.Join(err, d.Close())
			}
			return d, nil
		}
		began := time.Now()
		d, err := s.subvolume(ctx, creating, rec.ID, func() error {
			_, err := s.in.Enforcer.Lift(creating, rec.ID, rec.UID)
			return err
		})
		rec.Origin.TookMillis = time.Since(began).Milliseconds()
		if err != nil {
			return nil, err
		}
		applied, err := s.in.Enforcer.Adopt(s.in.Store.Root(), d, rec.UID, reconcile.InfoOf(store.Entry{Record: rec}))
		if err != nil {
			return nil, errors.Join(err, d.Close())
		}
		rec.Quota, rec.ProjectID = string(applied.Kind), uint64(applied.ID)
		return d, nil
	}
}

// subvolume makes a snapshot of a subvolume that has no other inside, which would be empty in the snapshot: a pod can
// make one. A pod may also have made the root of its volume immutable: the snapshot could not be moved into its place, nor away again.
// Taking that off is charged to the snapshot, which is as full as its source: so lift takes its limit off before.
func (s *source) subvolume(ctx context.Context, creating *dir.Dir, name string, lift func() error) (*dir.Dir, error) {
	err := trace.Step(ctx, "snapshot the subvolume", func() error { return clone.Whole(s.dir, creating, name) })
	if errors.Is(err, clone.ErrNested) {
		err = fmt.Errorf("%w: a btrfs subvolume was made in volume %s meanwhile: the next attempt copies it file by file", volume.ErrPrecondition, s.id)
	}
	if err != nil {
		return nil, err
	}
	if err := lift(); err != nil {
		return nil, err
	}
	if _, err := dir.Unprotect(creating, name); err != nil {
		return nil, err
	}
	return creating.Open(name)
}

// fill copies the content into a directory that makeDir has made, and notes what can be said of it.
func (s *source) fill(ctx context.Context, d *dir.Dir, o *volume.Origin) error {
	began := time.Now()
	stall, err := s.copy(ctx, d, o)
	if s.method != volume.BySubvolume {
		o.TookMillis, o.StallMillis = time.Since(began).Milliseconds(), stall.Milliseconds()
	}
	o.Cut = time.Now().UTC()
	return err
}

func (s *source) copy(ctx context.Context, d *dir.Dir, o *volume.Origin) (stall time.Duration, err error) {
	o.Consistency = volume.PointInTime
	switch {
	case s.method == volume.BySubvolume: // which was made before it is asked for
		written, err := s.wasWritten()
		if written {
			o.Consistency = volume.CrashConsistent
		}
		return 0, err
	case s.entry.Block():
		stall, err = s.in.View().Disk(s.id, s.entry.Record).Copy(ctx, s.dir, d, s.method, clone.Limit(s.way.MaxStall), s.inUse)
		if err != nil {
			return stall, err
		}
		// What the pod has written without a flush may be in the file in another order.
		written, err := s.wasWritten()
		if written {
			o.Consistency = volume.CrashConsistent
		}
		return stall, err
	}
	var result clone.Result
	step := trace.Begin(ctx, "copy the tree")
	err = privilege.With(privilege.ForCopies, func() (err error) {
		if result, err = clone.Tree(ctx, s.dir, d, s.options()); err != nil {
			return err
		}
		return clone.Sync(d)
	})
	err = step.EndWith(err)
	if !result.PointInTime && !s.fixed {
		o.Consistency = volume.Unverified
	}
	return result.Stall, err
}

// verifyRounds is how often what changed in a tree is copied again before it counts as one
// that never holds still.
const verifyRounds = 3

// options are how a tree is copied. A snapshot is not compared with its copy: no pod writes to it, and a ctime
// there may be of the same tick of the clock, or in the future since the clock was set.
func (s *source) options() clone.Options {
	o := clone.Options{Method: clone.Share}
	if s.method == volume.ByCopy {
		o.Method = clone.Copy
	}
	if s.fixed {
		return o
	}
	o.Rounds, o.MaxStall, o.Alone = verifyRounds, clone.Limit(s.way.MaxStall), s.alone
	switch s.way.WhenWritten {
	case volume.Accept:
		o.Rounds, o.Alone = 1, nil
	case volume.Freeze:
		o.Rounds, o.Hold, o.HoldAtMost = 1, s.freeze, s.way.frozenAtMost()
	}
	return o
}

// errUnstill is the answer to a request for a consistent copy of a tree that changed during each attempt.
var errUnstill = fmt.Errorf("%w: its files changed during each attempt to copy them", volume.ErrPrecondition)
