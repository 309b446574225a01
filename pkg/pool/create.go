package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Request is for a new volume.
type Request struct {
	ID volume.ID
	// Pool may be the zero PoolName where only one can be meant.
	Pool  volume.PoolName
	Range volume.Range
	// Mode is what the volume is to be, for its whole life; empty for ModeMount.
	Mode volume.Mode
	// OtherNodesOnly asks for a volume that need not be reached from this node, but
	// from others.
	OtherNodesOnly bool
	// MultiNode asks for a volume that several nodes can publish.
	MultiNode bool
	// Inline asks for one that lives as long as its publication.
	Inline bool
	// Provisional asks for one that is recorded as such until Confirm.
	Provisional bool
	// Source is what the volume is to be made from; nil for an empty volume.
	Source *Source
	// target asks for the copy of a volume of another node; nil for a volume.
	target *target
}

// Create makes a volume, or returns the one that is there if it is what the
// request asks for. When it returns, the volume is durable. The caller holds the
// volume's lock. Errors: ErrInvalid, ErrExists, ErrOutOfRange, ErrNoSpace,
// ErrUnavailable, ErrDamagedRecord, ErrLost, ErrIO.
func (s *Set) Create(ctx context.Context, r Request) (Volume, error) {
	if r.Mode == "" {
		r.Mode = volume.ModeMount
	}
	p, err := s.pool(r.Pool)
	if err != nil {
		return Volume{}, err
	}
	if err := r.Range.Check(); err != nil {
		return Volume{}, err
	}
	if r.MultiNode && !p.Config.MultiNode() {
		return Volume{}, fmt.Errorf("%w: an access mode for several nodes; pool %q is not shared, nor allows it for several pods of one node (allowReadWriteMany)", volume.ErrInvalid, p.Config.Name)
	}
	if r.OtherNodesOnly && !p.Config.Shared {
		if has(ctx, p, r.ID) {
			return Volume{}, fmt.Errorf("volume %s: %w on node %s, which is not among the topologies of the request", r.ID, volume.ErrExists, s.node.Options.Node)
		}
		return Volume{}, fmt.Errorf("%w: pool %q is reached only from node %s, which is not among the topologies of the request", volume.ErrOtherNode, p.Config.Name, s.node.Options.Node)
	}
	if r.ID.String() == p.Config.Reserved() {
		return Volume{}, fmt.Errorf("%w: the name %s is taken by the snapshots of pool %q", volume.ErrInvalid, r.ID, p.Config.Name)
	}
	if err := elsewhere(s.holders(r.ID), r.ID, p); err != nil {
		return Volume{}, err
	}
	if r.Source != nil {
		if err := sourceElsewhere(s.holders(r.Source.ID), r.Source.ID, p); err != nil {
			return Volume{}, err
		}
		// Copying may take longer than the call.
		own, end := s.node.UntilClose(ctx)
		defer end()
		ctx = own
	}
	v, err := create(ctx, p, r)
	if err != nil {
		return Volume{}, fmt.Errorf("create volume %s in pool %q: %w", r.ID, p.Config.Name, err)
	}
	return v, nil
}

// elsewhere returns ErrExists if another pool is known to have a volume of that
// name. The other pools' disks are not asked: one of them may hang.
func elsewhere(holders []*serve.Pool, id volume.ID, chosen *serve.Pool) error {
	for _, p := range holders {
		if p != chosen {
			return fmt.Errorf("%s: %w in pool %q", id.Named(), volume.ErrExists, p.Config.Name)
		}
	}
	return nil
}

// has reports whether the pool holds a volume, as far as it can be seen.
func has(ctx context.Context, p *serve.Pool, id volume.ID) bool {
	missing, err := lacks(ctx, p, id)
	return err == nil && !missing || err != nil && p.Ledger.Known(id).Exists()
}

// lacks reports whether the pool does not hold a volume.
func lacks(ctx context.Context, p *serve.Pool, id volume.ID) (bool, error) {
	v, err := findAt(ctx, p, id)
	if v != nil {
		v.close()
	}
	return v == nil, err
}

func create(ctx context.Context, p *serve.Pool, r Request) (Volume, error) {
	in, err := p.Enter(ctx)
	if err != nil {
		return Volume{}, noCapacity(p, r.ID, err)
	}
	defer in.Close()
	// Other nodes promise from a shared pool too: one at a time, and each reads
	// what the others wrote.
	unlock, err := in.LockToPromise(ctx, r.ID)
	if err != nil {
		return Volume{}, err
	}
	defer unlock()
	if err := in.View().Index().LoadShared(); err != nil {
		return Volume{}, err
	}
	space, err := in.Store.Space()
	if err != nil {
		return Volume{}, err
	}
	e, d, err := in.View().Lookup(r.ID)
	if err != nil {
		return Volume{}, err
	}
	if d != nil {
		defer func() { _ = d.Close() }()
	}
	p.Note(r.ID, e)
	removed, err := finishRemoval(in, r.ID, e)
	if err != nil {
		return Volume{}, err
	}
	if e.Exists() && !removed {
		return existing(in, r, e, d, space)
	}
	if err := in.Work(); err != nil {
		return Volume{}, limit.NoSpace(err)
	}
	defer in.Making()()
	return createNew(ctx, in, r, space)
}

// noCapacity is the answer of a pool that does not serve: it has no space, and
// ErrNoSpace makes the scheduler try another node. If the volume is known
// to be here, or the pool is only being opened, the caller has to wait instead.
func noCapacity(p *serve.Pool, id volume.ID, err error) error {
	if p.Ledger.Known(id).Exists() || errors.Is(err, serve.ErrNotChecked) {
		return err
	}
	return fmt.Errorf("%w: %w", volume.ErrNoSpace, err)
}

// existing answers a repeated call.
func existing(in *serve.Visit, r Request, e store.Entry, d *dir.Dir, space dir.Space) (Volume, error) {
	if e.Damage != nil {
		return Volume{}, e.Damage
	}
	if e.Lost() {
		return Volume{}, fmt.Errorf("%w: its record is there, but its directory is missing; "+
			"delete the volume before creating another of its name", volume.ErrLost)
	}
	found := in.View().Volume(r.ID, reconcile.InfoOf(e), space)
	if r.target != nil {
		return found, r.target.is(e)
	}
	if err := e.Unmoved(); err != nil {
		return Volume{}, err
	}
	if !r.Range.Allows(found.Bytes) {
		return Volume{}, fmt.Errorf("%w with %d bytes", volume.ErrExists, found.Bytes)
	}
	if e.Mode() != r.Mode {
		return Volume{}, fmt.Errorf("%w with the mode %s", volume.ErrExists, e.Mode())
	}
	if e.Inline() != r.Inline {
		return Volume{}, fmt.Errorf("%w with another life cycle: inline is %v", volume.ErrExists, e.Inline())
	}
	if !r.Source.isOf(e.Record) {
		return Volume{}, fmt.Errorf("%w, made from another source", volume.ErrExists)
	}
	if err := in.View().Content(r.ID, e.Record).Check(d); err != nil {
		return Volume{}, err
	}
	// The call that made it may have failed at its last step.
	return found, in.Store.Creating().SyncParent(r.ID)
}

// createNew makes a volume of which there is nothing yet: what it promises is set aside, then it is built.
func createNew(ctx context.Context, in *serve.Visit, r Request, space dir.Space) (Volume, error) {
	// The pool may serve all the same: what is read-only needs no limits.
	if err := in.Pool.Limits().MustNotServe(in.Enforcer); err != nil {
		return Volume{}, noCapacity(in.Pool, r.ID, in.Pool.Unavailable(err))
	}
	if err := checkDevices(in.Pool, r.Mode); err != nil {
		return Volume{}, err
	}
	var src *source
	if r.Source != nil {
		var err error
		if src, err = openRequested(ctx, in, r); err != nil {
			return Volume{}, err
		}
		defer src.close()
		r.Range = src.atLeast(r.Range)
	}
	bytes, err := r.Range.Promise(unit(r.Mode, space))
	if err != nil {
		return Volume{}, err
	}
	if err := errors.Join(ctx.Err(), in.Pool.OthersAreRead()); err != nil {
		return Volume{}, err
	}
	rec := newRecord(in, r, bytes)
	if src != nil {
		if err := src.room(rec, space); err != nil {
			return Volume{}, err
		}
	}
	owed := in.Pool.Ledger.Owed(reconcile.InfoOf(store.Entry{Record: rec}))
	err = makeReserved(in, rec, space, owed, func() error {
		if src == nil {
			return limit.NoSpace(build(ctx, in, rec, limited(ctx, in, rec), fill(ctx, in, r, rec)))
		}
		if err := src.begin(ctx, rec); err != nil {
			return err
		}
		return limit.NoSpace(build(ctx, in, rec, src.makeDir(ctx, rec), src.restore(ctx, rec, volume.Range{Required: bytes, Limit: r.Range.Limit})))
	})
	switch {
	case errors.Is(err, fs.ErrExist):
		return Volume{}, fmt.Errorf("%w as something that is not a volume: %w", volume.ErrExists, err)
	case err != nil:
		return Volume{}, err
	}
	return in.View().Volume(r.ID, reconcile.InfoOf(store.Entry{Record: rec, Present: true}), space), nil
}

// makeReserved makes a volume or a snapshot while bytes are set aside for it, which then become its promise. What is left of
// an attempt that fails counts as trash before the bytes are given back. Errors: volume.ErrNoSpace, volume.ErrUnavailable.
func makeReserved(in *serve.Visit, rec *store.Record, space dir.Space, bytes int64, steps func() error) error {
	id, err := volume.ParseEntry(rec.ID)
	if err != nil {
		return err
	}
	held, err := in.Pool.Ledger.Reserve(space, bytes)
	if err != nil {
		return err
	}
	defer func() {
		if held.Held() {
			undo(in, id)
			held.Release()
		}
	}()
	if err := steps(); err != nil {
		return err
	}
	held.Commit(id, reconcile.InfoOf(store.Entry{Record: rec, Present: true}))
	return nil
}

// checkDevices reports now, and not when a pod waits for its device, that a block volume could have none.
func checkDevices(p *serve.Pool, mode volume.Mode) error {
	if mode != volume.ModeBlock {
		return nil
	}
	return content.DeviceError(p.Options.Devices.CheckNodes())
}

// newRecord is the record of a volume that is to be made.
func newRecord(in *serve.Visit, r Request, bytes int64) *store.Record {
	rec := store.NewRecord(r.ID, r.Mode, bytes)
	rec.Inline, rec.Provisional = r.Inline, r.Provisional
	if r.Mode == volume.ModeBlock {
		rec.Thin = in.Pool.Config.Allocation == loop.Thin
	} else {
		rec.BytesPerInode = in.Enforcer.Sizes.RecordedInodes()
	}
	if r.target != nil {
		rec.Move = r.target.Move
		rec.BytesPerInode = r.target.BytesPerInode
	}
	if in.Enforcer.Unenforced() == nil {
		rec.Quota = string(in.Enforcer.Kind())
	}
	return rec
}

// build makes a volume or a snapshot aside and then puts it in its place in one step.
func build(ctx context.Context, in *serve.Visit, rec *store.Record, makeDir func(*dir.Dir) (*dir.Dir, error), fill func(*dir.Dir) error) (err error) {
	id, err := volume.ParseEntry(rec.ID)
	if err != nil {
		return err
	}
	if rec.Origin != nil {
		end := in.Pool.CountCopy(rec.Origin.Method)
		defer func() { end(time.Duration(rec.Origin.StallMillis)*time.Millisecond, err) }()
	}
	if err := in.Discard().DiscardCreation(rec.ID); err != nil {
		return err
	}
	if err := in.Store.Creating().Stage(makeDir, fill); err != nil {
		return err
	}
	if err := trace.Step(ctx, "write the record", func() error { return in.Store.Records().Write(rec) }); err != nil {
		return err
	}
	return trace.Step(ctx, "move into the pool", func() error { return in.Store.Creating().Commit(id) })
}

// limited makes the directory of a new volume, under its limit from the beginning, and
// notes in the record which quota enforces it.
func limited(ctx context.Context, in *serve.Visit, rec *store.Record) func(*dir.Dir) (*dir.Dir, error) {
	return func(creating *dir.Dir) (*dir.Dir, error) {
		step := trace.Begin(ctx, "make the directory and its limit")
		d, applied, err := in.Enforcer.Make(in.Store.Root(), creating, rec.ID, rec.UID, reconcile.InfoOf(store.Entry{Record: rec}))
		if err := step.EndWith(err); err != nil {
			return nil, err
		}
		rec.Quota, rec.ProjectID = string(applied.Kind), uint64(applied.ID)
		return d, nil
	}
}

// fill makes the content of a new volume, and notes in the record what it has chosen.
func fill(ctx context.Context, in *serve.Visit, r Request, rec *store.Record) func(*dir.Dir) error {
	return func(d *dir.Dir) error {
		made := in.View().Content(r.ID, rec)
		if err := made.Make(ctx, d); err != nil {
			return err
		}
		if disk, ok := made.(*content.Disk); ok {
			rec.BlockBytes = disk.BlockBytes
		}
		if r.target != nil {
			rec.BlockBytes = r.target.BlockBytes
		}
		return nil
	}
}

// unit is what a size is rounded up to.
func unit(mode volume.Mode, space dir.Space) int64 {
	if mode == volume.ModeBlock {
		return max(space.BlockBytes, loop.Unit)
	}
	return space.BlockBytes
}

// undo removes what a failed creation left, the record first: a record without a
// directory would be a lost volume. What cannot be undone now, recovery undoes.
func undo(in *serve.Visit, id volume.ID) {
	if err := in.Discard().UndoCreation(id); err != nil {
		in.Pool.Log.Error(err, "Failed to clean up after a failed creation", "volume", id.String())
	}
	// The last step may have failed after it took effect: then the volume is there.
	e, d, err := in.View().Lookup(id)
	if d != nil {
		_ = d.Close()
	}
	if err == nil {
		in.Pool.Note(id, e)
	}
}

// Confirm records, durably, that a volume is not provisional any more: the caller that asked for it has saved it. What a client knows it by is
// recorded too, unless that is empty or the volume has no record. The caller holds the volume's lock. Errors: ErrNotFound, ErrUnavailable,
// ErrDamagedRecord, ErrIO, ErrAmbiguous.
func (s *Set) Confirm(ctx context.Context, id volume.ID, client string) error {
	v, err := s.find(ctx, id, volume.PoolName{})
	if err != nil {
		return err
	}
	defer v.close()
	if v.confirmed(client) {
		return nil
	}
	if err := v.confirm(ctx, client); err != nil {
		return fmt.Errorf("confirm volume %s: %w", id, err)
	}
	return nil
}

func (v *found) confirmed(client string) bool {
	rec := v.entry.Record
	return rec == nil || !rec.Provisional && (client == "" || client == rec.Client)
}

func (v *found) confirm(ctx context.Context, client string) error {
	unlock, err := v.visit.LockToPromise(ctx, v.id)
	if err != nil {
		return err
	}
	defer unlock()
	if err := v.reread(); err != nil || v.confirmed(client) {
		return err
	}
	rec := *v.entry.Record
	rec.Provisional, rec.Client = false, cmp.Or(client, rec.Client)
	return v.visit.Store.Records().Write(&rec)
}
