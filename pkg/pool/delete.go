package pool

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Delete removes a volume. It answers ErrNotFound if there is none, and ErrInUse
// while it is published: the kernel would let the data of a mounted directory go.
// When it returns the volume is gone durably; its content goes later. The caller
// holds the volume's lock.
func (s *Set) Delete(ctx context.Context, id volume.ID) error {
	in, err := s.find(id, volume.PoolName{})
	if err != nil {
		return err
	}
	defer in.close()
	if err := s.pins.Free(id); err != nil {
		return err
	}
	return in.delete(ctx)
}

func (v *found) delete(ctx context.Context) error {
	unlock, err := v.lock(ctx)
	if err != nil {
		return fmt.Errorf("delete volume %s: %w", v.id, err)
	}
	defer unlock()
	if err := v.unused(); err != nil {
		return fmt.Errorf("delete volume %s: %w", v.id, err)
	}
	if err := v.detached(ctx); err != nil {
		return fmt.Errorf("delete volume %s: %w", v.id, err)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	err = trace.Step(ctx, "move to the trash", func() error { return v.visit.remove(v.id, v.entry) })
	if errors.Is(err, syscall.EROFS) {
		err = v.visit.pool.unavailable(err)
	}
	if err != nil {
		return fmt.Errorf("delete volume %s: %w", v.id, err)
	}
	return nil
}

// unused answers ErrInUse, with the place, for a volume that is published.
func (v *found) unused() error {
	published, err := v.published()
	if err != nil {
		return err
	}
	if len(published) > 0 {
		return fmt.Errorf("it is %w, published at %s", volume.ErrInUse, published[0].Path)
	}
	nodes, err := v.visit.store.PublishedBy(v.id, store.UnseenAfter)
	if err != nil {
		return err
	}
	if len(nodes) > 0 {
		return fmt.Errorf("it is %w, published on node %s", volume.ErrInUse, nodes[0])
	}
	return nil
}

// remove takes a volume out of the pool in one step, and then its record. The reaper
// hears of it after that: were there no trash any more, but a record, recovery would
// find a volume that was lost.
func (v *visit) remove(id volume.ID, e store.Entry) error {
	if err := v.work(); err != nil {
		return err
	}
	defer v.pool.ledger.Keep(id)()
	if e.Lost() {
		if err := v.store.DropRecord(id); err != nil {
			return err
		}
		v.pool.note(id, store.Entry{})
		v.discard().ReleaseLost(id, e)
		return nil
	}
	thrown := store.Trashed(id, e)
	if err := v.store.Remove(id, thrown); err != nil {
		return err
	}
	e.Present = false
	v.pool.note(id, e)
	if err := v.store.DropRecord(id); err != nil {
		return err
	}
	v.pool.thrown(thrown)
	v.pool.note(id, store.Entry{})
	return nil
}
