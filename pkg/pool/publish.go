package pool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Publication is asked for by Publish.
type Publication struct {
	ID VolumeID
	// Pool is where the volume is said to be; the zero Name for wherever it is.
	Pool   Name
	Target bind.Target
	Flags  bind.Flags
	// SingleTarget allows the volume at this target alone.
	SingleTarget bool
	// MultiNode is the access mode of several nodes.
	MultiNode bool
}

// Publish makes a volume appear at the target. The caller holds the volume's lock
// and the target's. Errors: ErrInvalid, ErrNotFound, ErrExists for a target that is
// taken, ErrInUse for a second target of a volume for one, ErrUnavailable, ErrDamaged.
func (s *Set) Publish(_ context.Context, r Publication) error {
	v, err := s.find(r.ID, r.Pool)
	if err != nil {
		return err
	}
	defer v.close()
	if r.MultiNode && !v.session.pool.config.Shared {
		return fmt.Errorf("%w: an access mode for several nodes; pool %q is not shared", ErrInvalid, v.session.pool.config.Name)
	}
	if err := v.publish(r); err != nil {
		return fmt.Errorf("publish volume %s: %w", r.ID, err)
	}
	return nil
}

func (v *found) publish(r Publication) error {
	if err := v.entry.usable(v.id); err != nil {
		return err
	}
	p := v.session.pool
	p.note(v.id, v.entry) // it may have been moved here by hand
	if changed, err := p.options.Labels.Ensure(v.dir, p.config.Relabel); err != nil {
		return err
	} else if changed {
		p.log.Info("relabelled a volume that came with another label", "volume", v.id.name)
	}
	if r.SingleTarget {
		if err := v.onlyAt(r.Target); err != nil {
			return err
		}
	}
	if err := v.session.markPublished(v.id); err != nil {
		return err
	}
	if err := p.options.Mounts.Publish(v.dir, r.Target, r.Flags); err != nil {
		return errors.Join(mountError(err), v.session.unmarkPublished(v.id))
	}
	return nil
}

// onlyAt answers ErrInUse if the volume is published anywhere but at the target.
func (v *found) onlyAt(target bind.Target) error {
	published, err := v.session.published(v.id)
	if err != nil || len(published) == 0 {
		return err
	}
	at, err := v.session.pool.options.Mounts.Open(target)
	if err == nil {
		defer func() { _ = at.Close() }()
		if same, err := sameDir(at, v.dir); err != nil || same {
			return err // here already: Publish answers
		}
	}
	return fmt.Errorf("it is %w at %s, and its access mode allows one target", ErrInUse, published[0].Path)
}

func sameDir(a, b *dir.Dir) (bool, error) {
	aID, err := a.ID()
	if err != nil {
		return false, err
	}
	bID, err := b.ID()
	return aID == bID, err
}

// PublishInline makes a volume that lives as long as its publication, and
// publishes it. The caller holds the volume's lock and the target's.
func (s *Set) PublishInline(ctx context.Context, create Request, r Publication) error {
	create.Inline = true
	p, err := s.pool(create.Pool)
	if err != nil {
		return err
	}
	was := p.has(create.ID)
	if _, err := s.Create(ctx, create); err != nil {
		return err
	}
	r.Pool = p.config.Name
	err = s.Publish(ctx, r)
	if err != nil && !was {
		// Nobody has seen the volume yet, and nobody else would remove it.
		return errors.Join(err, s.Delete(ctx, create.ID))
	}
	return err
}

// Unpublish removes a volume from the target, and an inline volume altogether
// once it is published nowhere. A volume or target that is not there is no error. The
// caller holds both locks. Errors: ErrInvalid, ErrExists for a target that carries
// something else, ErrInUse for a publication that a process uses.
func (s *Set) Unpublish(ctx context.Context, id VolumeID, target bind.Target) error {
	v, err := s.find(id, Name{})
	switch {
	case errors.Is(err, ErrNotFound), errors.Is(err, ErrDamaged):
		return s.unpublishUnknown(id, target)
	case errors.Is(err, ErrUnavailable):
		return s.unpublishUnreachable(id, target, err)
	case err != nil:
		return err
	}
	defer v.close()
	if err := v.unpublish(ctx, target); err != nil {
		return fmt.Errorf("unpublish volume %s: %w", id, err)
	}
	return nil
}

func (v *found) unpublish(ctx context.Context, target bind.Target) error {
	var of *dir.ID
	if v.dir != nil {
		id, err := v.dir.ID()
		if err != nil {
			return err
		}
		of = &id
	}
	if err := mountError(v.session.pool.options.Mounts.Unpublish(target, of)); err != nil {
		return err
	}
	if err := v.session.unmarkPublished(v.id); err != nil {
		return err
	}
	if !v.entry.inline() {
		return nil
	}
	err := v.delete(ctx)
	if errors.Is(err, ErrInUse) {
		return nil // the last of its publications will remove it
	}
	return err
}

// unpublishUnknown takes off whatever is mounted, of a volume that is not there or
// that two pools have: nothing is removed by it but the mount.
func (s *Set) unpublishUnknown(id VolumeID, target bind.Target) error {
	if err := mountError(s.options.Mounts.Unpublish(target, nil)); err != nil {
		return fmt.Errorf("unpublish volume %s: %w", id, err)
	}
	return nil
}

// unpublishUnreachable lets a pod end whose pool went away. An inline volume is
// kept for a later call, which removes it.
func (s *Set) unpublishUnreachable(id VolumeID, target bind.Target, unavailable error) error {
	if err := s.unpublishUnknown(id, target); err != nil {
		return err
	}
	for _, p := range s.pools {
		if p.known(id).inline() {
			return unavailable
		}
	}
	return nil
}

// Stats measures a published volume. It answers ErrNotFound if the volume is not
// published at the path.
func (s *Set) Stats(_ context.Context, id VolumeID, at bind.Target) (Stats, error) {
	v, err := s.find(id, Name{})
	if err != nil {
		return Stats{}, err
	}
	defer v.close()
	if v.entry.lost() {
		return Stats{Condition: v.session.pool.facts(v.entry, dir.Space{FreeBytes: -1}).Condition()}, nil
	}
	stats, err := v.stats(at)
	if err != nil {
		return Stats{}, fmt.Errorf("measure volume %s: %w", id, err)
	}
	return stats, nil
}

func (v *found) stats(at bind.Target) (Stats, error) {
	d, err := v.session.pool.options.Mounts.Open(at)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, bind.ErrTarget) {
		return Stats{}, fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	if err != nil {
		return Stats{}, err
	}
	defer func() { _ = d.Close() }()
	same, err := sameDir(d, v.dir)
	if err != nil {
		return Stats{}, err
	}
	if !same {
		return Stats{}, fmt.Errorf("%w: it is not published at %s", ErrNotFound, at)
	}
	space, err := d.Space()
	if err != nil {
		return Stats{}, err
	}
	poolSpace, err := v.session.root.Space()
	if err != nil {
		return Stats{}, err
	}
	// A publication that is read-only says nothing about the pool.
	facts := v.session.pool.facts(v.entry, space)
	facts.ReadOnly = poolSpace.ReadOnly
	return Stats{Space: space, Condition: facts.Condition()}, nil
}

// mountError translates the errors of the mount facility into those of this package.
func mountError(err error) error {
	switch {
	case errors.Is(err, bind.ErrTarget), errors.Is(err, bind.ErrFlag):
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	case errors.Is(err, bind.ErrOccupied):
		return fmt.Errorf("%w: %w", ErrExists, err)
	case errors.Is(err, bind.ErrBusy):
		return fmt.Errorf("%w: %w", ErrInUse, err)
	}
	return err
}

// published are the mounts of a volume and of what is inside it.
func (s *session) published(id VolumeID) ([]bind.Publication, error) {
	all, err := s.pool.options.Mounts.Published(s.root)
	return all[id.name], err
}
