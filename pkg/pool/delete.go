package pool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Delete removes a volume. It returns ErrNotFound if there is none, and ErrInUse
// while it is published: the kernel would let the data of a mounted directory go.
// When it returns the volume is gone durably; its content goes later. The caller
// holds the volume's lock.
func (s *Set) Delete(ctx context.Context, id volume.ID) error { return s.DeleteOnly(ctx, id, "") }

// DeleteOnly is Delete for a volume that is abnormal for a reason, and returns ErrPrecondition for
// any other. That is judged under the lock that the deletion has. An empty reason is for any volume.
func (s *Set) DeleteOnly(ctx context.Context, id volume.ID, only health.Reason) error {
	in, err := s.find(ctx, id, volume.PoolName{})
	if err != nil {
		if errors.Is(err, volume.ErrNotFound) { // it may be an earlier call that has removed no more than the volume
			if err := errors.Join(keepRemoved(ctx, s.node, id), s.Moves().dropReferences(ctx, id)); err != nil {
				return err
			}
		}
		return unlessOutOfUse(s.node, id, err)
	}
	defer in.close()
	if err := s.node.Pins.Free(id); err != nil {
		return err
	}
	if err := in.deleteOnly(ctx, only); err != nil {
		return err
	}
	return s.Moves().dropReferences(ctx, id)
}

// keepRemoved makes durable that no pool has an entry: an earlier call may have removed it, and failed at that.
func keepRemoved(ctx context.Context, n *serve.Node, id volume.ID) error {
	for _, p := range n.Pools {
		v, err := p.Enter(ctx)
		if err != nil {
			return err
		}
		err = v.Store.SyncRemoved(id)
		v.Close()
		if err != nil {
			return fmt.Errorf("delete %s: %w", id.Named(), err)
		}
	}
	return nil
}

// unlessOutOfUse is the error of a search for what is to be deleted: what no pool has may be in one that was taken out of
// the configuration.
func unlessOutOfUse(n *serve.Node, id volume.ID, err error) error {
	if !errors.Is(err, volume.ErrNotFound) {
		return err
	}
	if outOfUse := n.OutOfUse(id); outOfUse != nil {
		return outOfUse
	}
	return err
}

// Missing returns ErrPrecondition while a pool that this node has served, and that may have volumes, is not configured or not mounted. What has
// no name of a volume, and is remembered nowhere, may be there.
func (s *Set) Missing(id volume.ID) error { return s.node.AnyOutOfUse(id) }

func (v *found) delete(ctx context.Context) error { return v.deleteOnly(ctx, "") }

func (v *found) deleteOnly(ctx context.Context, only health.Reason) error {
	unlock, err := v.lock(ctx)
	if err != nil {
		return fmt.Errorf("delete volume %s: %w", v.id, err)
	}
	defer unlock()
	if err := v.checkOnly(only); err != nil {
		return fmt.Errorf("delete volume %s: %w", v.id, err)
	}
	if err := v.entry.Unmoved(); err != nil {
		return fmt.Errorf("delete volume %s: %w", v.id, err)
	}
	return v.removeUnused(ctx)
}

// removeUnused removes a volume that is not in use. The caller has lock.
func (v *found) removeUnused(ctx context.Context) error {
	if err := v.unusedAnywhere(ctx); err != nil {
		return fmt.Errorf("delete volume %s: %w", v.id, err)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	err := trace.Step(ctx, "move to the trash", func() error { return remove(v.visit, v.id, v.entry) })
	if errors.Is(err, syscall.EROFS) {
		err = v.visit.Pool.Unavailable(err)
	}
	if err != nil {
		return fmt.Errorf("delete volume %s: %w", v.id, err)
	}
	return nil
}

// checkOnly returns ErrPrecondition unless the volume is abnormal for the reason that is asked for, if any is; others may be known
// besides. The caller has its lock.
func (v *found) checkOnly(asked health.Reason) error {
	if asked == "" {
		return nil
	}
	in := v.visit.View()
	in.Lock = func(volume.ID) (func(), error) { return func() {}, nil }
	is := in.List(nil).Describe(v.id, v.entry, v.dir)
	if slices.ContainsFunc(is.Conditions, func(c health.Condition) bool { return c.Reason == asked }) {
		return nil
	}
	return fmt.Errorf("%w: its condition is %q, not %s", volume.ErrPrecondition, is.Condition.Message, asked)
}

// unusedAnywhere returns ErrInUse for a volume that is published, or whose file is attached.
func (v *found) unusedAnywhere(ctx context.Context) error {
	if err := v.unused(); err != nil {
		return err
	}
	return v.use().Detach(ctx)
}

// unused returns ErrInUse, with the place, for a volume that is published.
func (v *found) unused() error {
	published, err := v.use().Published()
	if err != nil {
		return err
	}
	if len(published) > 0 {
		return fmt.Errorf("it is %w, published at %s", volume.ErrInUse, published[0].Path)
	}
	if err := v.visit.Store.Nodes().UnpublishedElsewhere(v.id); err != nil {
		return fmt.Errorf("it is %w", err)
	}
	return nil
}

// remove takes a volume out of the pool in one step, and then its record. The reaper
// is notified after that: were there no trash any more, but a record, recovery would
// find a volume that was lost.
func remove(in *serve.Visit, id volume.ID, e store.Entry) error {
	defer in.Pool.Ledger.Keep(id)()
	if removed, err := finishRemoval(in, id, e); removed || err != nil {
		return err
	}
	if e.Lost() {
		return forget(in, id, e)
	}
	thrown, err := in.Store.Trash().Remove(id, store.Trashed(id, e))
	if errors.Is(err, syscall.EDQUOT) {
		thrown, err = removeUnlimited(in, id, e)
	}
	if err != nil {
		return err
	}
	e.Present = false
	in.Pool.Note(id, e)
	if thrown == "" { // it counts as erased trash, whose blocks others may share
		piece := store.Trashed(id, e)
		queueTrash(in, piece, e)
		defer in.Pool.Ledger.Trash().Tried(piece, nil)
		return forget(in, id, e)
	}
	if err := in.Store.Records().Drop(id); err != nil {
		return err
	}
	queueTrash(in, thrown, e)
	in.Pool.Note(id, store.Entry{})
	return nil
}

// forget removes what there is of a volume without a directory.
func forget(in *serve.Visit, id volume.ID, e store.Entry) error {
	if err := in.Store.Records().Drop(id); err != nil {
		return err
	}
	in.Pool.Note(id, store.Entry{})
	in.Discard().ReleaseLost(id, e)
	return nil
}

// removeUnlimited moves a full volume to the trash without its limit: what it takes to change the root of a subvolume, as
// when flags are taken off it, is charged to that. If it stays after all it has its limit again.
func removeUnlimited(in *serve.Visit, id volume.ID, e store.Entry) (thrown string, err error) {
	parent, err := in.Store.Parent(id)
	if err != nil {
		return "", err
	}
	uid := ""
	if e.Record != nil {
		uid = e.Record.UID
	}
	if _, err := in.Enforcer.Lift(parent, id.String(), uid); err != nil {
		return "", err
	}
	if thrown, err = in.Store.Trash().Remove(id, store.Trashed(id, e)); err != nil {
		return "", errors.Join(err, restoreIfLimited(in, id, e))
	}
	return thrown, nil
}

// finishRemoval ends a removal that failed after the directory was taken out of the pool, and returns false where there was none.
func finishRemoval(in *serve.Visit, id volume.ID, e store.Entry) (bool, error) {
	if !e.Lost() || e.Record == nil {
		return false, nil
	}
	piece, err := in.Store.Trash().FinishRemove(id, e)
	if err != nil || piece == "" {
		return false, err
	}
	if err := in.Store.Records().Drop(id); err != nil {
		return false, err
	}
	queueTrash(in, piece, e)
	in.Pool.Note(id, store.Entry{})
	return true, nil
}

// queueTrash queues what was removed for the reaper. It may occupy all that was owed for it, which is more than the name of the piece says. After a start
// the rest is counted as what others hold.
func queueTrash(in *serve.Visit, piece string, e store.Entry) {
	in.Pool.Ledger.Trash().Throw(piece, in.Pool.Ledger.Owed(reconcile.InfoOf(e)))
	family := ""
	if e.Record != nil {
		family = e.Record.Family
	}
	in.Pool.Ledger.Trash().Removed(piece, family)
}
