package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// legacyName is the pool that the upstream KubeVirt driver took where none was named.
var legacyName, _ = volume.ParsePoolName("legacy")

// Options are what all pools of a process share.
type Options = serve.Options

// Mounts publishes directories and devices: bind.Kernel, or a stand-in that keeps its contract.
type Mounts = serve.Mounts

// Devices makes files block devices: loop.Kernel, or a stand-in that keeps its contract.
type Devices = content.Devices

// A Status is what is shown of a pool to people and monitoring.
type Status = serve.Status

// Copies are those of a Status.
type Copies = serve.Copies

// A CopySum is how many copies were made by a method, and how long that took.
type CopySum = serve.CopySum

// Counted is what of a Status is counted once a minute.
type Counted = serve.Counted

// Erased is what of a Status the reaper has done.
type Erased = serve.Erased

// A Volume is what is reported of one.
type Volume = reconcile.Volume

// Surveyed is what the last check at a volume saw.
type Surveyed = reconcile.Surveyed

// A Set is all pools of a node, with the calls on their volumes.
type Set struct {
	node   *serve.Node
	byName map[volume.PoolName]*serve.Pool
	undone sync.Map // moves, as moveKey: see Moves.notUndone
}

// Start begins to serve pools: see serve.Start.
func Start(configs []poolconfig.Config, options Options) *Set {
	s := &Set{node: serve.Start(configs, options), byName: make(map[volume.PoolName]*serve.Pool)}
	for _, p := range s.node.Pools {
		s.byName[p.Config.Name] = p
	}
	return s
}

// Close stops the background work and waits for it until ctx ends.
func (s *Set) Close(ctx context.Context) error { return s.node.Close(ctx) }

// Wait waits until every pool was checked once, whatever was found, or ctx ends.
func (s *Set) Wait(ctx context.Context) error { return s.node.Wait(ctx) }

// Ready reports whether every pool was checked once. It never waits.
func (s *Set) Ready() bool { return s.node.Ready() }

// Status reports on all pools, from memory.
func (s *Set) Status() []Status { return s.node.Status() }

// Surveyed reports on each volume, from memory, if the options ask for that.
func (s *Set) Surveyed() []Surveyed { return s.node.Surveyed() }

// Lock takes a volume for one call, or returns ErrBusy at once.
func (s *Set) Lock(id volume.ID) (unlock func(), err error) { return s.node.Lock(id) }

// ShareTarget takes a volume and a target for one call, which others share at other targets, or returns ErrBusy at once.
func (s *Set) ShareTarget(id volume.ID, target bind.Target) (unlock func(), err error) {
	return s.node.ShareTarget(id, target)
}

// pool is the pool of a name. Where none is named it is the one named "legacy", as
// with the upstream KubeVirt driver, or the only one.
func (s *Set) pool(name volume.PoolName) (*serve.Pool, error) {
	if name != (volume.PoolName{}) {
		if p, ok := s.byName[name]; ok {
			return p, nil
		}
		return nil, fmt.Errorf("%w: no pool is named %q; there are %s", volume.ErrInvalid, name, names(s.node.Pools))
	}
	if p, ok := s.byName[legacyName]; ok {
		return p, nil
	}
	if len(s.node.Pools) == 1 {
		return s.node.Pools[0], nil
	}
	return nil, fmt.Errorf("%w: no pool is named; choose one of %s", volume.ErrInvalid, names(s.node.Pools))
}

func names(pools []*serve.Pool) string {
	var names []string
	for _, p := range pools {
		names = append(names, fmt.Sprintf("%q", p.Config.Name))
	}
	return strings.Join(names, ", ")
}

// Capacity is how many bytes a pool can still promise; 0 for one that does not
// serve. The only error is ErrInvalid for a pool that is not configured.
func (s *Set) Capacity(ctx context.Context, name volume.PoolName, multiNode bool) (int64, error) {
	p, err := s.pool(name)
	if err != nil {
		return 0, err
	}
	if multiNode && !p.Config.MultiNode() {
		return 0, nil
	}
	bytes, _ := p.Free(ctx)
	return bytes, nil
}

// Serves says whether a pool that is configured serves.
func (s *Set) Serves(ctx context.Context, name volume.PoolName) bool {
	p, err := s.pool(name)
	if err != nil {
		return false
	}
	_, serves := p.Free(ctx)
	return serves
}

// Directory is the directory of a pool, as the calls on its volumes have it. Errors: ErrInvalid for a pool that is not configured, ErrUnavailable
// for one that does not serve.
func (s *Set) Directory(ctx context.Context, name volume.PoolName) (dir.ID, error) {
	p, err := s.pool(name)
	if err != nil {
		return dir.ID{}, err
	}
	v, err := p.Enter(ctx)
	if err != nil {
		return dir.ID{}, err
	}
	defer v.Close()
	return v.Store.Root().ID()
}

// Shared reports whether a pool is served by several nodes.
func (s *Set) Shared(name volume.PoolName) (bool, error) {
	p, err := s.pool(name)
	if err != nil {
		return false, err
	}
	return p.Config.Shared, nil
}

// A found volume is one that a call works on.
type found struct {
	id    volume.ID
	visit *serve.Visit
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
	e, d, err := v.visit.View().Lookup(v.id)
	if err != nil {
		return err
	}
	if v.dir != nil {
		_ = v.dir.Close() // opened for reading
	}
	v.entry, v.dir = e, d
	v.visit.Pool.Note(v.id, e)
	if !e.Exists() {
		return fmt.Errorf("%w any more", volume.ErrNotFound)
	}
	return nil
}

// unmarkPublished takes the mark back once the volume is published nowhere on this node.
func (v *found) unmarkPublished(ctx context.Context) error {
	if !v.visit.Pool.Config.Shared {
		return nil // one from before is removed by the sweep
	}
	return v.visit.UnmarkPublished(ctx, v.use())
}

// find searches for a volume: in the named pool, then in the one that is known to have it, then in all. What a
// PersistentVolume says of its pool cannot be changed: by now the pool may have another name, or the volume may
// have been moved into another pool. It returns ErrNotFound only if every pool could be asked, for a volume of a
// pool that is away is not gone, and ErrInvalid for a volume in no pool and the name of none.
func (s *Set) find(ctx context.Context, id volume.ID, name volume.PoolName) (*found, error) {
	if p, ok := s.byName[name]; ok {
		v, err := findIn(ctx, []*serve.Pool{p}, id)
		if !errors.Is(err, volume.ErrNotFound) {
			return v, err
		}
	}
	// Not the others, of which one may be about to hang.
	v, err := findIn(ctx, s.holders(id), id)
	if errors.Is(err, volume.ErrNotFound) {
		v, err = findIn(ctx, s.node.Pools, id)
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
	for _, p := range s.node.Pools {
		if p.Ledger.Known(id).Exists() {
			holders = append(holders, p)
		}
	}
	return holders
}

func findIn(ctx context.Context, pools []*serve.Pool, id volume.ID) (*found, error) {
	var at *found
	var unavailable []error
	for _, p := range pools {
		v, err := findAt(ctx, p, id)
		switch {
		case err != nil:
			unavailable = append(unavailable, err)
		case v != nil && at != nil:
			v.close()
			at.close()
			return nil, serve.InTwo(id, at.visit.Pool, p)
		case v != nil:
			at = v
		}
	}
	return at, notFoundUnless(at != nil, id, unavailable)
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
func findAt(ctx context.Context, p *serve.Pool, id volume.ID) (*found, error) {
	v, err := p.Enter(ctx)
	if err != nil {
		return nil, err
	}
	e, d, err := v.View().Lookup(id)
	if err != nil || !e.Exists() {
		v.Close()
		return nil, err
	}
	return &found{id: id, visit: v, entry: e, dir: d}, nil
}

// findSettled is find for callers that hold no lock. A record without a directory is a
// moment of making and removing a volume: only what is so under the lock is lost.
func (s *Set) findSettled(ctx context.Context, id volume.ID) (*found, error) {
	v, err := s.find(ctx, id, volume.PoolName{})
	if err != nil || !v.entry.Lost() {
		return v, err
	}
	v.entry, v.dir, err = v.visit.View().LookupSettled(id)
	if err == nil && !v.entry.Exists() {
		err = fmt.Errorf("%s: %w: it is being made or removed", id.Named(), volume.ErrNotFound)
	}
	if err != nil {
		v.close()
		return nil, err
	}
	return v, nil
}
