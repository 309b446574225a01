package pool

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
)

// Delete removes a volume. It answers ErrNotFound if there is none, and ErrInUse
// while it is published: the kernel would let the data of a mounted directory go.
// When it returns the volume is gone durably; its content goes later. The caller
// holds the volume's lock.
func (s *Set) Delete(ctx context.Context, id VolumeID) error {
	in, err := s.find(id, Name{})
	if err != nil {
		return err
	}
	defer in.close()
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
	err = trace.Step(ctx, "move to the trash", func() error { return v.session.remove(v.id, v.entry) })
	if errors.Is(err, syscall.EROFS) {
		err = v.session.pool.unavailable(err)
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
		return fmt.Errorf("it is %w, published at %s", ErrInUse, published[0].Path)
	}
	elsewhere, err := v.session.publishedElsewhere()
	if err != nil {
		return err
	}
	if nodes := elsewhere[v.id.name]; len(nodes) > 0 {
		return fmt.Errorf("it is %w, published on node %s", ErrInUse, nodes[0])
	}
	return nil
}

// remove takes a volume out of the pool in one step, and then its record. The reaper
// hears of it after that: were there no trash any more, but a record, recovery would
// find a volume that was lost.
func (s *session) remove(id VolumeID, e entry) error {
	if err := s.work(); err != nil {
		return err
	}
	lost := !e.present
	promised := e.promised()
	// By the record's own name for the volume, recovery sees that this removal was
	// begun, and not that the directory was lost.
	suffix := randomSuffix()
	if e.record != nil {
		suffix = e.record.UID
	}
	thrown := id.name + "." + suffix
	defer s.pool.keep(id)()
	if !lost {
		if err := s.root.Rename(id.name, s.trash, thrown); err != nil {
			return err
		}
		if err := errors.Join(s.trash.Sync(), s.root.Sync()); err != nil {
			return err
		}
		e.present = false
		s.pool.note(id, e)
	}
	if err := s.dropRecord(id); err != nil {
		return err
	}
	if lost {
		s.pool.note(id, entry{})
		s.releaseLost(id, e)
		return nil
	}
	s.pool.trashed(thrown, promised)
	s.pool.note(id, entry{})
	return nil
}

// keep has loads that begin before the returned function is called leave a volume as it is
// known: a record that they find gone is not counted as trash before that.
func (p *Pool) keep(id VolumeID) (until func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.kept == nil {
		p.kept = make(ids)
	}
	p.kept[id] = struct{}{}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.kept, id)
	}
}

// throwAway moves an entry that is no volume into the trash, where the reaper removes
// it. The promise that it held is told, for the ledger.
func (s *session) throwAway(from *dir.Dir, name, as string, promised int64) error {
	if err := from.Rename(name, s.trash, as); err != nil {
		return err
	}
	s.pool.trashed(as, promised)
	return nil
}
