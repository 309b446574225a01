package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/snapshot"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A visit is one call's work in a pool.
type visit struct {
	*serve.Visit
	pins *snapshot.Pins // of all pools
}

func (s *Set) enter(p *serve.Pool) (*visit, error) {
	v, err := p.Enter()
	if err != nil {
		return nil, err
	}
	return &visit{v, &s.pins}, nil
}

// finishRemoval ends a removal that failed after the directory was taken out of the pool, and returns false where there was none.
func (v *visit) finishRemoval(id volume.ID, e store.Entry) (bool, error) {
	if !e.Lost() || e.Record == nil {
		return false, nil
	}
	piece, err := v.Store.Trash().FinishRemove(id, e)
	if err != nil || piece == "" {
		return false, err
	}
	if err := v.Store.Records().Drop(id); err != nil {
		return false, err
	}
	v.queueTrash(piece, e)
	v.Pool.Note(id, store.Entry{})
	return true, nil
}

// queueTrash queues what was removed for the reaper.
func (v *visit) queueTrash(piece string, e store.Entry) {
	v.Pool.QueueTrash(piece)
	family := ""
	if e.Record != nil {
		family = e.Record.Family
	}
	v.Pool.Ledger.Trash().Removed(piece, family)
}

// A found volume is one that a call works on.
type found struct {
	id    volume.ID
	visit *visit
	entry store.Entry
	dir   *dir.Dir // nil if the directory is lost
}

func (v *found) close() {
	if v.dir != nil {
		_ = v.dir.Close()
	}
	v.visit.Close()
}

// use is how this node uses the volume.
func (v *found) use() *reconcile.VolumeUse { return v.visit.Use(v.id, v.entry, v.dir) }

// durable is for a step that was done already, but may have failed at making that durable.
func (v *found) durable() error { return store.IgnoreReadOnly(v.visit.Store.Records().Sync()) }

// lock extends the caller's lock of the volume to all nodes of a shared pool, and reads it
// again: another node may have removed it since it was found, or made another.
func (v *found) lock(ctx context.Context) (unlock func(), err error) {
	unlock, err = v.visit.LockNodes(ctx, v.id)
	if err != nil || !v.visit.Pool.Config.Shared {
		return unlock, err
	}
	if err := v.reread(); err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// reread reads the volume again, as lock does after it has waited. It returns ErrNotFound for a volume
// that is not there any more.
func (v *found) reread() error {
	e, d, err := v.visit.Scan().Lookup(v.id)
	if err != nil {
		return err
	}
	if v.dir != nil {
		_ = v.dir.Close() // opened for reading
	}
	v.entry, v.dir = e, d
	v.visit.Pool.Note(v.id, e)
	if !e.Exists() {
		return fmt.Errorf("volume %s: %w any more", v.id, volume.ErrNotFound)
	}
	return nil
}

// unmarkPublished takes the mark back once the volume is published nowhere on this node.
func (v *found) unmarkPublished(ctx context.Context) error {
	return v.visit.UnmarkPublished(ctx, v.use())
}

// find searches for a volume: in the named pool, then in the one that is known to have it, then in all. What a
// PersistentVolume says of its pool cannot be changed: by now the pool may have another name, or the volume may
// have been moved into another pool. It returns ErrNotFound only if every pool could be asked, for a volume of a
// pool that is away is not gone, and ErrInvalid for a volume in no pool and the name of none.
func (s *Set) find(id volume.ID, name volume.PoolName) (*found, error) {
	if p, ok := s.byName[name]; ok {
		v, err := s.findIn([]*serve.Pool{p}, id)
		if !errors.Is(err, volume.ErrNotFound) {
			return v, err
		}
	}
	// Not the others, of which one may be about to hang.
	v, err := s.findIn(s.holders(id), id)
	if errors.Is(err, volume.ErrNotFound) {
		v, err = s.findIn(s.Pools, id)
	}
	if errors.Is(err, volume.ErrNotFound) && name != (volume.PoolName{}) {
		_, unknown := s.pool(name)
		err = cmp.Or(unknown, err)
	}
	return v, err
}

// Holder names the pool that is known to have a volume, from memory. It returns false for
// none, and for several.
func (s *Set) Holder(id volume.ID) (volume.PoolName, bool) {
	holders := s.holders(id)
	if len(holders) != 1 {
		return volume.PoolName{}, false
	}
	return holders[0].Config.Name, true
}

// holders are the pools whose index has a volume.
func (s *Set) holders(id volume.ID) []*serve.Pool {
	var holders []*serve.Pool
	for _, p := range s.Pools {
		if p.Ledger.Known(id).Exists() {
			holders = append(holders, p)
		}
	}
	return holders
}

func (s *Set) findIn(pools []*serve.Pool, id volume.ID) (*found, error) {
	var at *found
	var unavailable []error
	for _, p := range pools {
		v, err := s.findAt(p, id)
		switch {
		case err != nil:
			unavailable = append(unavailable, err)
		case v != nil && at != nil:
			v.close()
			at.close()
			return nil, ambiguous(id, at.visit.Pool, p)
		case v != nil:
			at = v
		}
	}
	return at, notFoundUnless(at != nil, id, unavailable)
}

func ambiguous(id volume.ID, first, second *serve.Pool) error {
	return fmt.Errorf("%s %w: %q and %q; move one of the two away", id.Named(), volume.ErrAmbiguous, first.Config.Name, second.Config.Name)
}

// notFoundUnless returns ErrNotFound for a volume that no pool has, and why not all could be asked otherwise.
func notFoundUnless(found bool, id volume.ID, unavailable []error) error {
	switch {
	case found:
		return nil
	case len(unavailable) > 0:
		return fmt.Errorf("%s: %w", id.Named(), errors.Join(unavailable...))
	}
	return fmt.Errorf("%s: %w", id.Named(), volume.ErrNotFound)
}

// findAt returns nil if the pool has no such volume.
func (s *Set) findAt(p *serve.Pool, id volume.ID) (*found, error) {
	v, err := s.enter(p)
	if err != nil {
		return nil, err
	}
	e, d, err := v.Scan().Lookup(id)
	if err != nil || !e.Exists() {
		v.Close()
		return nil, err
	}
	return &found{id: id, visit: v, entry: e, dir: d}, nil
}

// findSettled is find for callers that hold no lock. A record without a directory is a
// moment of making and removing a volume: only what is so under the lock is lost.
func (s *Set) findSettled(id volume.ID) (*found, error) {
	v, err := s.find(id, volume.PoolName{})
	if err != nil || !v.entry.Lost() {
		return v, err
	}
	v.entry, v.dir, err = v.visit.Scan().LookupSettled(id)
	if err == nil && !v.entry.Exists() {
		err = fmt.Errorf("%s: %w: it is being made or removed", id.Named(), volume.ErrNotFound)
	}
	if err != nil {
		v.close()
		return nil, err
	}
	return v, nil
}
