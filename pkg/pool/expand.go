package pool

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
)

// Expand raises the size of a published volume while it is in use, and answers its
// size. A volume that is large enough already stays as it is. The caller holds the
// volume's lock; the mode may be empty, for either. Errors: ErrInvalid, ErrNotFound,
// ErrOutOfRange for less than the volume has and for more than the pool can promise,
// ErrNoSpace for a filesystem that is full all the same, ErrUnavailable, ErrDamaged.
func (s *Set) Expand(ctx context.Context, id VolumeID, at bind.Target, mode Mode, r Range) (int64, error) {
	if err := r.check(); err != nil {
		return 0, err
	}
	v, err := s.find(id, Name{})
	if err != nil {
		return 0, err
	}
	defer v.close()
	if err := v.entry.usable(id); err != nil {
		return 0, err
	}
	if mode != "" {
		err = v.entry.usedAs(mode)
	}
	if err == nil {
		err = s.publishedAt(v, at)
	}
	if err != nil {
		return 0, fmt.Errorf("expand volume %s: %w", id, err)
	}
	bytes, err := v.expand(ctx, r)
	if err != nil {
		return 0, fmt.Errorf("expand volume %s: %w", id, err)
	}
	return bytes, nil
}

func (v *found) expand(ctx context.Context, r Range) (int64, error) {
	unlock, err := v.session.lockToPromise(ctx, v.id)
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
	space, err := v.session.space()
	if err != nil {
		return 0, err
	}
	has := v.session.pool.volume(v.id, v.entry.card(), space).Bytes
	switch {
	case r.Limit > 0 && r.Limit < has:
		return 0, fmt.Errorf("%w: it has %d bytes, and volumes do not shrink", ErrOutOfRange, has)
	case r.Required <= has:
		return has, errors.Join(v.session.restoreIfLimited(v.id, v.entry), v.growDevices())
	case v.entry.record != nil && v.entry.record.Quota != "" && !v.session.enforced(v.entry.card()):
		return 0, fmt.Errorf("%w: the volume was made under a limit of %s, which the pool cannot change as it is mounted and configured now",
			ErrUnavailable, v.entry.record.Quota)
	case v.entry.record == nil:
		return 0, fmt.Errorf("%w: it came without a promise and has its pool's size", ErrOutOfRange)
	case space.ReadOnly:
		return 0, v.session.pool.unavailable(syscall.EROFS)
	}
	bytes, err := r.promise(unit(v.entry.mode(), space))
	if err != nil {
		return 0, err
	}
	if bytes, err = v.grownTo(bytes, r); err != nil {
		return 0, err
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	held, err := v.session.pool.reserve(space, bytes-has)
	if err != nil {
		return 0, fmt.Errorf("%w: %v", ErrOutOfRange, err)
	}
	defer held.release()
	if err := v.grow(ctx, bytes, held); err != nil {
		return 0, err
	}
	return bytes, nil
}

// grow writes the new promise and then lets the kernel keep it. After a crash in
// between, start-up raises the limit to the record. The file of a block volume comes
// first, for it may not fit; start-up raises the record to a file that is larger.
func (v *found) grow(ctx context.Context, bytes int64, held *reservation) error {
	s := v.session
	grown := *v.entry.record
	grown.Bytes = bytes
	e := entry{record: &grown, present: true}
	var had int64 // what the file of a block volume had
	if v.entry.block() {
		var err error
		step := trace.Begin(ctx, "make the file larger")
		had, err = v.growFile(ctx, e)
		if step.EndWith(err) != nil {
			return noSpace(err)
		}
	}
	if err := trace.Step(ctx, "write the record", func() error { return writeRecord(s.volumes, &grown) }); err != nil {
		if againErr := v.again(); againErr != nil {
			// Which record there is now is not known. A file that is too large does no harm.
			return errors.Join(noSpace(err), againErr)
		}
		return errors.Join(noSpace(err), v.cutFile(had))
	}
	held.commit(v.id, e)
	if v.entry.block() {
		return trace.Step(ctx, "make the devices larger", v.growDevices)
	}
	return trace.Step(ctx, "set the limit", func() error { return s.limit(v.dir, e) })
}

// limit lets the kernel keep the size of a volume, where it does.
func (s *session) limit(d *dir.Dir, e entry) error {
	c := e.card()
	if !s.enforced(c) {
		return nil
	}
	return s.quota.Limit(d, c.quotaID(), s.pool.limits(c))
}

// again reads the volume anew: another node may have changed it before this one had
// the lock, and a record whose writing failed may be there all the same.
func (v *found) again() error {
	if err := v.lookAgain(); err != nil {
		return err
	}
	return v.entry.usable(v.id)
}

// restoreIfLimited makes a repeated call finish what the first had left.
func (s *session) restoreIfLimited(id VolumeID, e entry) error {
	if c := e.card(); s.enforced(c) {
		return s.restoreLimit(id, c)
	}
	return nil
}

// publishedAt answers ErrNotFound unless the volume is published at the path.
func (s *Set) publishedAt(v *found, at bind.Target) error {
	if v.entry.block() {
		return s.publishedDeviceAt(v, at)
	}
	err := s.publishedDirAt(v, at)
	if !errors.Is(err, ErrNotFound) {
		return err
	}
	if _, ok, fileErr := v.file(); ok && fileErr == nil {
		return s.publishedDeviceAt(v, at)
	}
	return err
}

func (s *Set) publishedDirAt(v *found, at bind.Target) error {
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
