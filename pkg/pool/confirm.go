package pool

import (
	"context"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Confirm records, durably, that a volume is not provisional any more: the caller that asked for it has saved it. The caller
// holds the volume's lock. Errors: ErrNotFound, ErrUnavailable, ErrDamagedRecord, ErrIO, ErrAmbiguous.
func (s *Set) Confirm(ctx context.Context, id volume.ID) error {
	v, err := s.find(id, volume.PoolName{})
	if err != nil {
		return err
	}
	defer v.close()
	if !v.entry.Provisional() {
		return nil
	}
	if err := v.confirm(ctx); err != nil {
		return fmt.Errorf("confirm volume %s: %w", id, err)
	}
	return nil
}

func (v *found) confirm(ctx context.Context) error {
	unlock, err := v.visit.LockToPromise(ctx, v.id)
	if err != nil {
		return err
	}
	defer unlock()
	if err := v.reread(); err != nil || !v.entry.Provisional() {
		return err
	}
	rec := *v.entry.Record
	rec.Provisional = false
	return v.visit.Store.Records().Write(&rec)
}
