package pool

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// Expand raises the size of a published volume while it is in use, and answers its
// size. A volume that is large enough already stays as it is. The caller holds the
// volume's lock. Errors: ErrInvalid, ErrNotFound, ErrOutOfRange for less than the
// volume has and for more than the pool can promise, ErrUnavailable, ErrDamaged.
func (s *Set) Expand(ctx context.Context, id VolumeID, at bind.Target, r Range) (int64, error) {
	if err := r.check(); err != nil {
		return 0, err
	}
	v, err := s.find(id, Name{})
	if err != nil {
		return 0, err
	}
	defer v.close()
	bytes, err := v.expand(ctx, at, r)
	if err != nil {
		return 0, fmt.Errorf("expand volume %s: %w", id, err)
	}
	return bytes, nil
}

func (v *found) expand(ctx context.Context, at bind.Target, r Range) (int64, error) {
	if err := v.entry.usable(v.id); err != nil {
		return 0, err
	}
	if err := v.publishedAt(at); err != nil {
		return 0, err
	}
	unlock, err := v.session.lockShared()
	if err != nil {
		return 0, err
	}
	defer unlock()
	if err := v.session.loadShared(); err != nil {
		return 0, err
	}
	if err := v.again(); err != nil {
		return 0, err
	}
	space, err := v.session.root.Space()
	if err != nil {
		return 0, err
	}
	has := v.session.pool.volume(v.id, v.entry, space).Bytes
	switch {
	case r.Limit > 0 && r.Limit < has:
		return 0, fmt.Errorf("%w: it has %d bytes, and volumes do not shrink", ErrOutOfRange, has)
	case r.Required <= has:
		return has, v.session.restoreIfLimited(v.id, v.entry)
	case v.entry.record != nil && v.entry.record.Quota != "" && !v.session.enforced(v.entry):
		return 0, fmt.Errorf("%w: the volume was made under a limit of %s, which the pool cannot change as it is mounted and configured now",
			ErrUnavailable, v.entry.record.Quota)
	case v.entry.record == nil:
		return 0, fmt.Errorf("%w: it came without a promise and has its pool's size", ErrOutOfRange)
	case space.ReadOnly:
		return 0, v.session.pool.unavailable(syscall.EROFS)
	}
	bytes, err := r.promise(space.BlockBytes)
	if err != nil {
		return 0, err
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if err := v.session.pool.reserve(space, bytes-has); err != nil {
		return 0, fmt.Errorf("%w: %v", ErrOutOfRange, err)
	}
	if err := v.grow(bytes); err != nil {
		return 0, err
	}
	return bytes, nil
}

// grow writes the new promise and then lets the kernel keep it. After a crash in
// between, start-up raises the limit to the record.
func (v *found) grow(bytes int64) error {
	grown := *v.entry.record
	grown.Bytes = bytes
	e := entry{record: &grown, present: true}
	added := bytes - v.entry.record.Bytes
	if err := writeRecord(v.session.volumes, &grown); err != nil {
		v.session.pool.release(added)
		return errors.Join(noSpace(err), v.again())
	}
	v.session.pool.commit(v.id, e, added)
	if !v.session.enforced(e) {
		return nil
	}
	return v.session.quota.Limit(v.dir, quota.ID(grown.ProjectID), v.session.pool.limits(bytes))
}

// again reads the volume anew: another node may have changed it before this one had
// the lock, and a record whose writing failed may be there all the same.
func (v *found) again() error {
	e, d, err := v.session.lookup(v.id)
	if d != nil {
		_ = d.Close() // the handle from before is of the same directory
	}
	if err != nil {
		return err
	}
	v.entry = e
	v.session.pool.note(v.id, e)
	return e.usable(v.id)
}

// restoreIfLimited makes a repeated call finish what the first had left.
func (s *session) restoreIfLimited(id VolumeID, e entry) error {
	if !s.enforced(e) {
		return nil
	}
	return s.restoreLimit(id, e)
}

// publishedAt answers ErrNotFound unless the volume is published at the path.
func (v *found) publishedAt(at bind.Target) error {
	d, err := v.session.pool.options.Mounts.Open(at)
	if isMissing(err) || errors.Is(err, bind.ErrTarget) {
		return fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	same, err := sameDir(d, v.dir)
	if err == nil && !same {
		err = fmt.Errorf("%w: it is not published at %s", ErrNotFound, at)
	}
	return err
}
