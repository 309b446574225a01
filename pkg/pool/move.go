package pool

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A volume moves to another node in these steps, each durable when it returns, and each of which can be repeated:
//
//  1. PrepareTarget there: a copy that is no volume yet, with the promise of the source;
//  2. the mover copies, while pods go on, from a Reference if there can be one: Based records there that the copy equals it;
//  3. Fence here: the source is not published any more;
//  4. when the source is published nowhere, the mover copies what has changed since, and compares;
//  5. Received there: the copy is whole, as of that fence, and no other session has filled it since;
//  6. HandOver here: from now on the source stays fenced;
//  7. ConfirmTarget there: the copy is the volume;
//  8. RemoveSource here.
//
// Up to 6 the source has every write that was acknowledged, and Unfence and AbortTarget undo the move. From 7 on the target has.
// Between the two no node publishes the volume, and both have all of it. So at no time do two nodes publish it.

// Moves are this node's part in moves of volumes to other nodes and from them.
type Moves struct{ set *Set }

// Moves are those of all pools.
func (s *Set) Moves() Moves { return Moves{s} }

// A Move names one side of a move.
type Move struct {
	Volume volume.ID
	ID     volume.MoveID
	// Peer is the other node. Only Fence and PrepareTarget need it.
	Peer volume.NodeID
}

// A moveKey is a move as this process remembers it.
type moveKey struct {
	volume volume.ID
	move   volume.MoveID
}

// noteUndone remembers, as long as this process lives, that a move is undone here: the record may say so later, or not at all, as on a full
// filesystem and on the target.
func (s Moves) noteUndone(m Move) { s.set.undone.Store(moveKey{m.Volume, m.ID}, nil) }

// notUndone refuses a move that was undone here. Its mover may have been made late, or go on although its pod was removed by force, and
// nothing would undo what that does.
func (s Moves) notUndone(m Move, rec *store.Record) error {
	_, undone := s.set.undone.Load(moveKey{m.Volume, m.ID})
	if undone || rec != nil && rec.Undone == m.ID.String() {
		return fmt.Errorf("%w: move %s was undone here: another one has another uid", volume.ErrPrecondition, m.ID)
	}
	return nil
}

// record is what a record says of the move.
func (m Move) record(role store.MoveRole) store.Move {
	return store.Move{ID: m.ID.String(), Role: role, Peer: m.Peer.String()}
}

// A side is a volume that one side of a move has.
type side struct{ *found }

// MoveState is what one node has of a volume that moves.
type MoveState struct {
	Pool volume.PoolName
	volume.Shape
	// UID is that of the record: another copy of the same name has another.
	UID string
	// Recorded says that the volume has a record. The size of one without is what it holds.
	Recorded bool
	// Used says that this node has the volume published, or its file attached.
	Used bool
	store.Move
	// Moved is the id of the last move that was confirmed, and Undone of the last that was undone here.
	Moved, Undone string
}

// State reports on a volume. Errors: ErrNotFound, ErrPrecondition for one that may be in a pool out of use, ErrUnavailable,
// ErrDamagedRecord, ErrLost, ErrIO, ErrAmbiguous.
func (s Moves) State(ctx context.Context, id volume.ID) (MoveState, error) {
	v, err := s.set.findSettled(ctx, id)
	if err != nil {
		return MoveState{}, unlessOutOfUse(s.set.node, id, err)
	}
	defer v.close()
	if err := v.entry.Usable(); err != nil {
		return MoveState{}, fmt.Errorf("%s: %w", id.Named(), err)
	}
	return (&side{v}).moveState()
}

func (v *side) moveState() (MoveState, error) {
	is := MoveState{Pool: v.visit.Pool.Config.Name, Shape: volume.Shape{Mode: v.entry.Mode()}, Recorded: v.entry.Record != nil, Move: v.entry.Move()}
	if rec := v.entry.Record; rec != nil {
		is.UID, is.Moved, is.Undone = rec.UID, rec.Moved, rec.Undone
		is.Bytes, is.BlockBytes, is.BytesPerInode = rec.Bytes, rec.BlockBytes, rec.BytesPerInode
	} else {
		is.Bytes = store.Measured(v.visit.Store.Root(), v.id.String())
	}
	var err error
	is.Used, err = v.use().Used()
	return is, err
}

// A FenceRequest is for the source of a move.
type FenceRequest struct {
	Move
	// Bytes is the promise of a volume without a record, unless it holds more.
	Bytes int64
	// LeaveSnapshots has those of the volume stay on this node; otherwise a volume with any is refused.
	LeaveSnapshots bool
}

// Fence has the volume not be published here any more. What is published stays until it is unpublished, and may be published again
// where it is. The caller holds the volume's lock. Errors: ErrInvalid, ErrNotFound, ErrPrecondition for a volume that another move
// has, or that has snapshots, and for a move that was undone, whose mover may have been made late, ErrBusy while it is copied, ErrUnavailable, ErrDamagedRecord, ErrLost, ErrIO, ErrAmbiguous.
func (s Moves) Fence(ctx context.Context, r FenceRequest) (MoveState, error) {
	v, err := s.findToMove(ctx, r.Volume)
	if err != nil {
		return MoveState{}, err
	}
	defer v.close()
	if v.entry.Move().Is(store.MoveSource, r.ID) {
		err = v.durable()
	} else {
		err = s.fence(ctx, v, r)
	}
	if err != nil {
		return MoveState{}, fmt.Errorf("fence volume %s: %w", r.Volume, err)
	}
	return v.moveState()
}

func (s Moves) fence(ctx context.Context, v *side, r FenceRequest) error {
	if err := v.movable(); err != nil {
		return err
	}
	if err := s.notUndone(r.Move, v.entry.Record); err != nil {
		return err
	}
	// Before the snapshots are read: one that is made now is among them when it is not pinned any more.
	if err := s.set.node.Pins.Free(r.Volume); err != nil {
		return err
	}
	if !r.LeaveSnapshots {
		if some, _ := s.set.Snapshots().List(ctx, volume.ID{}, r.Volume, 1); len(some) > 0 {
			return fmt.Errorf("%w: it has snapshots, such as %s, which stay on this node: delete them, or have them left behind", volume.ErrPrecondition, some[0].ID)
		}
	}
	rec, err := v.recordToMove(r.Bytes)
	if err != nil {
		return err
	}
	rec.Move = r.record(store.MoveSource)
	rec.Move.Fence, rec.Move.Recorded = store.RandomSuffix(), v.entry.Record == nil
	records := v.visit.Store.Records()
	err = v.written(records.Prepare(store.HandedOver, handedOver(rec)))
	if err == nil && !rec.Move.Recorded {
		err = v.written(records.Prepare(store.Unfenced, unfenced(rec, r.Move)))
	}
	if err != nil {
		return err
	}
	return v.write(ctx, rec)
}

// handedOver and unfenced are what the record of a fenced volume becomes.
func handedOver(rec *store.Record) *store.Record {
	next := *rec
	next.Move.HandedOver = true
	return &next
}

func unfenced(rec *store.Record, by Move) *store.Record {
	next := *rec
	next.Move, next.Undone = store.Move{}, by.ID.String()
	return &next
}

// movable returns why a volume cannot begin to move.
func (v *side) movable() error {
	if err := v.entry.Unmoved(); err != nil {
		return err
	}
	if v.entry.Inline() {
		return fmt.Errorf("%w: it is an inline volume, which ends with its pod", volume.ErrInvalid)
	}
	return unshared(v.visit.Pool)
}

// unshared refuses a pool whose volumes every node has already.
func unshared(p *serve.Pool) error {
	if p.Config.Shared {
		return fmt.Errorf("%w: pool %q is shared: its volumes are on all of its nodes", volume.ErrInvalid, p.Config.Name)
	}
	return nil
}

// recordToMove is the record of the volume, or a new one of so many bytes, or of what it holds if that is more.
func (v *side) recordToMove(bytes int64) (*store.Record, error) {
	if v.entry.Record != nil {
		rec := *v.entry.Record
		return &rec, nil
	}
	holds := store.Measured(v.visit.Store.Root(), v.id.String())
	if bytes = max(bytes, holds); bytes == 0 && holds == volume.Unknown {
		return nil, fmt.Errorf("%w: it has no record of its size and too many files to count them: name the size, such as that of its claim", volume.ErrInvalid)
	}
	space, err := v.visit.Store.Space()
	if err != nil {
		return nil, err
	}
	promised, err := volume.Range{Required: bytes}.Promise(space.BlockBytes)
	return store.NewRecord(v.id, volume.ModeMount, promised), err
}

// Unfence undoes Fence, and has neither that nor Reference be done by this move any more: the record says so, if the volume has one without
// the fence. A fence is undone on a full filesystem, too. Without one there, and on one that is read-only, only this process knows of it. A
// volume that was handed over may be confirmed on the other node: only for a caller who knows that the target was aborted it is published here
// again. The caller holds the volume's lock. Errors: ErrNotFound, ErrPrecondition for
// another move and for a volume that was handed over, ErrUnavailable, ErrDamagedRecord, ErrIO, ErrAmbiguous.
func (s Moves) Unfence(ctx context.Context, m Move, targetAborted bool) error {
	v, err := s.findToMove(ctx, m.Volume)
	if err != nil {
		return err
	}
	defer v.close()
	is := v.entry.Move()
	switch {
	case is == (store.Move{}):
	case !is.Is(store.MoveSource, m.ID):
		return v.notOf(m, "unfence")
	case is.HandedOver && !targetAborted:
		return fmt.Errorf("unfence volume %s: %w: it was handed over to node %s, which may have confirmed it: abort the target first", m.Volume, volume.ErrPrecondition, is.Peer)
	}
	s.noteUndone(m)
	if err = v.unfence(ctx, m); err == nil {
		err = s.dropReferences(ctx, m.Volume)
	}
	if err != nil {
		return fmt.Errorf("unfence volume %s: %w", m.Volume, err)
	}
	return nil
}

func (v *side) unfence(ctx context.Context, m Move) error {
	is := v.entry.Move()
	switch {
	case is.Recorded:
		return v.forgetRecord()
	case v.entry.Record == nil, is == (store.Move{}) && v.entry.Record.Undone == m.ID.String():
		return v.durable()
	}
	err := v.become(ctx, store.Unfenced, unfenced(v.entry.Record, m))
	if is == (store.Move{}) && (errors.Is(err, volume.ErrNoSpace) || errors.Is(err, syscall.EROFS)) {
		return nil // there is nothing to undo
	}
	return err
}

// forgetRecord removes the record that the fence had made.
func (v *side) forgetRecord() error {
	if err := v.visit.Store.Records().Drop(v.id); err != nil {
		return err
	}
	v.entry.Record = nil
	v.visit.Pool.Note(v.id, v.entry)
	return nil
}

// HandOver records that the target has all of the source as of a fence and may be confirmed. After that the source stays fenced.
// The caller holds the volume's lock. Errors: ErrNotFound, ErrInUse, ErrPrecondition for another move or fence, ErrUnavailable,
// ErrDamagedRecord, ErrIO, ErrAmbiguous.
func (s Moves) HandOver(ctx context.Context, m Move, fence string) error {
	v, err := s.findToMove(ctx, m.Volume)
	if err != nil {
		return err
	}
	defer v.close()
	is := v.entry.Move()
	switch {
	case !is.Is(store.MoveSource, m.ID):
		return v.notOf(m, "hand over")
	case is.Fence != fence:
		return fmt.Errorf("hand over volume %s: %w: it was fenced anew since, and the copy may lack what was written in between", m.Volume, volume.ErrPrecondition)
	}
	err = v.unusedAnywhere(ctx)
	switch {
	case err != nil:
	case is.HandedOver:
		err = v.durable()
	default:
		err = v.become(ctx, store.HandedOver, handedOver(v.entry.Record))
	}
	if err != nil {
		return fmt.Errorf("hand over volume %s: %w", m.Volume, err)
	}
	return nil
}

// RemoveSource removes the source after the target was confirmed. One that is not there is no error. The caller holds the
// volume's lock. Errors: ErrInUse, ErrPrecondition for a volume that this move has not handed over, ErrUnavailable,
// ErrDamagedRecord, ErrIO, ErrAmbiguous.
func (s Moves) RemoveSource(ctx context.Context, m Move) error {
	v, err := s.findToMove(ctx, m.Volume)
	if errors.Is(err, volume.ErrNotFound) {
		return s.dropReferences(ctx, m.Volume)
	}
	if err != nil {
		return err
	}
	defer v.close()
	is := v.entry.Move()
	switch {
	case !is.Is(store.MoveSource, m.ID):
		return v.notOf(m, "remove the source of")
	case !is.HandedOver:
		return fmt.Errorf("remove the source of volume %s: %w: it was not handed over to node %s", m.Volume, volume.ErrPrecondition, is.Peer)
	}
	if err := s.dropReferences(ctx, m.Volume); err != nil {
		return err
	}
	return v.discard(ctx, s.set)
}

// discard removes one side of a move.
func (v *side) discard(ctx context.Context, s *Set) error {
	if err := s.node.Pins.Free(v.id); err != nil {
		return err
	}
	unlock, err := v.lock(ctx)
	if err != nil {
		return fmt.Errorf("delete volume %s: %w", v.id, err)
	}
	defer unlock()
	return v.removeUnused(ctx)
}

// A TargetRequest is for the copy of a volume of another node.
type TargetRequest struct {
	Move
	// Pool may be the zero PoolName where only one can be meant.
	Pool volume.PoolName
	// Shape is that of the source.
	volume.Shape
}

// PrepareTarget makes a copy that is no volume yet, empty, or returns the one that this move has made, whose copy does not count
// as whole any more. One that is smaller than the source by now grows. The caller holds the volume's lock. Errors: those of Create,
// ErrPrecondition for a move that was aborted since this process runs, and for a volume that is in a pool out of use, which would hide this one when it is there again, and ErrCannotGrow.
func (s Moves) PrepareTarget(ctx context.Context, r TargetRequest) (MoveState, error) {
	create := Request{
		ID: r.Volume, Pool: r.Pool, Range: volume.Range{Required: r.Bytes}, Mode: r.Mode,
		target: &target{Move: r.record(store.MoveTarget), Shape: r.Shape},
	}
	p, err := s.set.pool(r.Pool)
	if err == nil {
		err = s.notUndone(r.Move, nil)
	}
	if err == nil {
		err = unshared(p)
	}
	if err == nil && len(s.set.holders(r.Volume)) == 0 {
		err = s.set.node.KnownOutOfUse(r.Volume)
	}
	if err == nil {
		_, err = s.set.Create(ctx, create)
	}
	if err != nil {
		return MoveState{}, err
	}
	v, err := s.findToMove(ctx, r.Volume)
	if err != nil {
		return MoveState{}, err
	}
	defer v.close()
	if err := v.prepareAgain(ctx, r); err != nil {
		return MoveState{}, fmt.Errorf("prepare volume %s: %w", r.Volume, err)
	}
	return v.moveState()
}

// A target is what the record of a copy has of its source.
type target struct {
	store.Move
	volume.Shape
}

// is returns ErrExists unless an entry is the copy that the move has made.
func (t *target) is(e store.Entry) error {
	if id, err := volume.ParseMoveID(t.ID); err != nil || !e.Move().Is(store.MoveTarget, id) {
		return errors.Join(err, fmt.Errorf("%w on this node, and is not of this move", volume.ErrExists))
	}
	if e.Mode() != t.Mode || e.Record.BlockBytes != t.BlockBytes {
		return fmt.Errorf("%w as another copy: abort it", volume.ErrExists)
	}
	return nil
}

// prepareAgain brings a copy that was there in line with its source.
func (v *side) prepareAgain(ctx context.Context, r TargetRequest) error {
	if v.entry.Move().Fence != "" {
		rec := *v.entry.Record
		rec.Move.Fence = ""
		if err := v.write(ctx, &rec); err != nil {
			return err
		}
	}
	if v.entry.Record.Bytes >= r.Bytes {
		return nil
	}
	if _, err := (growth{v.found}).expand(ctx, volume.Range{Required: r.Bytes}); err != nil {
		return err
	}
	return v.reread()
}

// Received records that a copy is whole as of a fence of its source, after all of it is on the disk. Filled is what Based has recorded
// of the session that filled it: one that has begun since may have something older, of a source that was to have ended. The caller
// holds the volume's lock. Errors: ErrInvalid, ErrNotFound, ErrPrecondition for another move or session, ErrUnavailable,
// ErrDamagedRecord, ErrLost, ErrIO, ErrAmbiguous.
func (s Moves) Received(ctx context.Context, m Move, fence, filled string) error {
	if fence == "" {
		return fmt.Errorf("%w: no fence is named", volume.ErrInvalid)
	}
	v, err := s.findTarget(ctx, m)
	if err != nil {
		return err
	}
	defer v.close()
	if v.entry.Move().Base != filled {
		return fmt.Errorf("receive volume %s: %w: another session has begun to fill the copy since", m.Volume, volume.ErrPrecondition)
	}
	if v.entry.Block() { // holes of the source are holes of the copy: set the space aside again
		err = limit.NoSpace(v.visit.View().Content(v.id, v.entry.Record).Grow(ctx, v.dir, v.entry.Record.Bytes))
	}
	if err == nil {
		err = trace.Step(ctx, "sync the copy", func() error { return clone.Sync(v.dir) })
	}
	if err == nil {
		rec := *v.entry.Record
		rec.Move.Fence = fence
		err = v.write(ctx, &rec)
	}
	if err != nil {
		return fmt.Errorf("receive volume %s: %w", m.Volume, err)
	}
	return nil
}

// Based records what the copy equals, durably: the token of a reference of its source, none where that is empty, or what no reference
// has while it is filled; and the way in which the two were compared. That takes the place of what was recorded; if something else is,
// the copy is another one, or another session fills it. What is filled is not whole any more. Who fills the copy has it locked (flock(2)). The caller holds the volume's lock.
// Errors: ErrInvalid, ErrNotFound, ErrPrecondition also for another move, ErrUnavailable, ErrDamagedRecord, ErrLost, ErrIO, ErrAmbiguous.
func (s Moves) Based(ctx context.Context, m Move, was, token, verify string) error {
	for _, name := range []string{token, verify} {
		if name != "" {
			if _, err := volume.ParseID(name); err != nil {
				return err
			}
		}
	}
	if verify != "" && token == "" {
		return fmt.Errorf("%w: a copy that is said to equal nothing was compared with nothing", volume.ErrInvalid)
	}
	v, err := s.findTarget(ctx, m)
	if err != nil {
		return err
	}
	defer v.close()
	rec := *v.entry.Record
	switch {
	case rec.Move.Base == token && rec.Move.Verify == verify:
		return v.durable()
	case rec.Move.Base == was:
	default:
		return fmt.Errorf("note what the copy of volume %s equals: %w: it was made anew, or another session fills it", m.Volume, volume.ErrPrecondition)
	}
	rec.Move.Base, rec.Move.Verify, rec.Move.Fence = token, verify, ""
	if err := v.write(ctx, &rec); err != nil {
		return fmt.Errorf("note what the copy of volume %s equals: %w", m.Volume, err)
	}
	return nil
}

// ConfirmTarget makes the copy a volume, in one step, if it is whole as of that fence. The source has to be handed over. The caller
// holds the volume's lock. Errors: ErrInvalid, ErrNotFound, ErrPrecondition for another move and for a copy that is not whole, ErrInUse
// for a copy that a mover has locked (flock(2)) since it fills it, ErrUnavailable, ErrDamagedRecord, ErrLost, ErrIO, ErrAmbiguous.
func (s Moves) ConfirmTarget(ctx context.Context, m Move, fence string) error {
	if fence == "" {
		return fmt.Errorf("%w: no fence is named", volume.ErrInvalid)
	}
	v, err := s.findToMove(ctx, m.Volume)
	if err != nil {
		return err
	}
	defer v.close()
	switch is := v.entry.Move(); {
	case v.movedBy(m): // that shows a caller that this node has the volume
		err := v.isThere()
		if err == nil {
			err = v.durable()
		}
		return confirming(m, err)
	case !is.Is(store.MoveTarget, m.ID):
		return v.notOf(m, "confirm")
	case is.Fence != fence:
		return fmt.Errorf("confirm volume %s: %w: the copy is not whole as of the fence %s of its source", m.Volume, volume.ErrPrecondition, fence)
	}
	if err := v.isThere(); err != nil {
		return confirming(m, err)
	}
	unlock, err := dir.TryLockDir(v.dir)
	if err != nil {
		return fmt.Errorf("confirm volume %s: a mover still fills it: %w: %w", m.Volume, volume.ErrInUse, err)
	}
	defer unlock()
	rec := *v.entry.Record
	rec.Move, rec.Moved = store.Move{}, m.ID.String()
	return confirming(m, v.write(ctx, &rec))
}

func confirming(m Move, err error) error {
	if err != nil {
		return fmt.Errorf("confirm volume %s: %w", m.Volume, err)
	}
	return nil
}

// isThere returns an error unless the volume has all that its record needs.
func (v *side) isThere() error {
	if err := v.entry.Usable(); err != nil {
		return err
	}
	return v.visit.View().Content(v.id, v.entry.Record).Check(v.dir)
}

// movedBy reports whether the volume is here by that move, which has ended.
func (v *side) movedBy(m Move) bool {
	return v.entry.Record != nil && v.entry.Record.Moved == m.ID.String() && v.entry.Move() == (store.Move{})
}

// AbortTarget removes the copy that the move has made. One that is not there is no error. A copy that was confirmed is removed only for a
// caller who knows that no pod has used it, and that the source has all of it still. The caller holds the volume's lock. Errors:
// ErrPrecondition for anything else of that name, ErrInUse, ErrUnavailable, ErrDamagedRecord, ErrIO, ErrAmbiguous.
func (s Moves) AbortTarget(ctx context.Context, m Move, evenConfirmed bool) error {
	s.noteUndone(m)
	v, err := s.findToMove(ctx, m.Volume)
	if errors.Is(err, volume.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer v.close()
	switch is := v.entry.Move(); {
	case v.movedBy(m) && evenConfirmed:
	case v.movedBy(m):
		return fmt.Errorf("abort volume %s: %w: it was confirmed, and is the volume now", m.Volume, volume.ErrPrecondition)
	case !is.Is(store.MoveTarget, m.ID):
		return v.notOf(m, "abort")
	}
	return v.discard(ctx, s.set)
}

// findTarget finds the copy that a move has made.
func (s Moves) findTarget(ctx context.Context, m Move) (*side, error) {
	v, err := s.findToMove(ctx, m.Volume)
	if err != nil {
		return nil, err
	}
	if !v.entry.Move().Is(store.MoveTarget, m.ID) {
		err = v.notOf(m, "receive")
	} else if err = v.entry.Usable(); err != nil {
		err = fmt.Errorf("%s: %w", m.Volume.Named(), err)
	}
	if err != nil {
		v.close()
		return nil, err
	}
	return v, nil
}

// findToMove finds a volume whose record can be read. What may be in a pool that is not there now is not gone: a fence of it, or a copy,
// would be there again with the pool, and no step would end it.
func (s Moves) findToMove(ctx context.Context, id volume.ID) (*side, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	v, err := s.set.find(ctx, id, volume.PoolName{})
	if err != nil {
		return nil, unlessOutOfUse(s.set.node, id, err)
	}
	if v.entry.Damage != nil {
		v.close()
		return nil, fmt.Errorf("%s: %w", id.Named(), v.entry.Damage)
	}
	return &side{v}, nil
}

// notOf is the error of a step of a move for a volume that has no part in it.
func (v *side) notOf(m Move, step string) error {
	is := "it is not moving"
	if has := v.entry.Move(); has != (store.Move{}) {
		is = fmt.Sprintf("it is the %s of move %s", has.Role, has.ID)
	}
	return fmt.Errorf("%s volume %s for move %s: %w: %s", step, m.Volume, m.ID, volume.ErrPrecondition, is)
}

// write replaces the record, durably.
func (v *side) write(ctx context.Context, rec *store.Record) error {
	return v.replace(ctx, rec, func() error { return v.visit.Store.Records().Write(rec) })
}

// become is write of what Fence has prepared.
func (v *side) become(ctx context.Context, next store.Next, rec *store.Record) error {
	return v.replace(ctx, rec, func() error { return v.visit.Store.Records().Become(next, rec) })
}

func (v *side) replace(ctx context.Context, rec *store.Record, do func() error) error {
	if err := v.written(trace.Step(ctx, "write the record", do)); err != nil {
		return err
	}
	v.entry.Record = rec
	v.visit.Pool.Ledger.Note(v.id, reconcile.InfoOf(v.entry))
	return nil
}

// written is the error of writing a record.
func (v *side) written(err error) error {
	if errors.Is(err, syscall.EROFS) {
		return v.visit.Pool.Unavailable(err)
	}
	return limit.NoSpace(err)
}
