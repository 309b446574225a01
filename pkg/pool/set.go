package pool

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/errorcount"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/keylock"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/nested"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/scan"
	"kubevirt.io/hostpath-provisioner/pkg/pool/snapshot"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/pool/use"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// legacyName is the pool that the upstream KubeVirt driver took where none was named.
var legacyName, _ = volume.ParsePoolName("legacy")

// A Set is all pools of a node.
type Set struct {
	options     Options
	pools       []*Pool // in the order of the configuration
	byName      map[volume.PoolName]*Pool
	volumes     keylock.Locks[volume.ID]
	targets     keylock.Locks[bind.Target]
	attaching   keylock.Turns[volume.ID] // devices of block volumes to files
	serving     keylock.Locks[string]
	pins        snapshot.Pins
	claims      limit.Registry
	places      nested.Places
	filesystems scan.Filesystems[*Pool]

	stop context.CancelFunc
	// untilClose is a context for work that goes on when the call that began it ends: Close
	// ends it, and waits until end is called.
	untilClose func(call context.Context) (ctx context.Context, end func())
	work       sync.WaitGroup
}

// Start begins to serve pools. Each is opened in the background, so that one that
// is missing or hangs keeps nobody waiting: Wait returns when all were checked.
// Close ends it.
func Start(configs []poolconfig.Pool, options Options) *Set {
	ctx, stop := context.WithCancel(context.Background())
	s := &Set{options: options.withDefaults(), byName: make(map[volume.PoolName]*Pool), stop: stop}
	s.untilClose = func(call context.Context) (context.Context, func()) {
		s.work.Add(1)
		own, cancel := context.WithCancel(context.WithoutCancel(call))
		unhook := context.AfterFunc(ctx, cancel)
		return own, func() { unhook(); cancel(); s.work.Done() }
	}
	for _, config := range configs {
		p := newPool(config, s)
		s.pools = append(s.pools, p)
		s.byName[config.Name] = p
	}
	for _, p := range s.pools {
		s.work.Go(func() { p.watch(ctx) })
		s.work.Go(func() { p.reap(ctx) })
		s.work.Go(func() { p.countAll(ctx) })
		s.work.Go(func() { p.surveyAll(ctx) })
		s.work.Go(func() { p.searchAll(ctx) })
	}
	return s
}

func (o Options) withDefaults() Options {
	if o.DetectQuota == nil {
		o.DetectQuota = quota.Detect
	}
	if o.CountErrors == nil {
		o.CountErrors = errorcount.Of
	}
	if o.SinceBoot == nil {
		o.SinceBoot = scan.SinceBoot
	}
	set := func(d *time.Duration, value time.Duration) {
		if *d == 0 {
			*d = value
		}
	}
	set(&o.CheckEvery, 10*time.Second)
	set(&o.RetryEvery, 2*time.Second)
	set(&o.HangAfter, 5*time.Second)
	set(&o.SyncEvery, time.Minute)
	return o
}

// Close stops the background work and waits for it until ctx ends.
func (s *Set) Close(ctx context.Context) error {
	s.stop()
	done := make(chan struct{})
	go func() {
		s.work.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop the pools: %w", context.Cause(ctx))
	}
}

// Wait waits until every pool was checked once, whatever was found, or ctx ends.
func (s *Set) Wait(ctx context.Context) error {
	for _, p := range s.pools {
		select {
		case <-p.checked:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// Ready reports whether every pool was checked once. It never waits.
func (s *Set) Ready() bool {
	for _, p := range s.pools {
		select {
		case <-p.checked:
		default:
			return false
		}
	}
	return true
}

// Status reports on all pools, from memory.
func (s *Set) Status() []Status {
	var all []Status
	for _, p := range s.pools {
		all = append(all, p.Status())
	}
	return all
}

// pool is the pool of a name. Where none is named it is the one named "legacy", as
// with the upstream KubeVirt driver, or the only one.
func (s *Set) pool(name volume.PoolName) (*Pool, error) {
	if name != (volume.PoolName{}) {
		if p, ok := s.byName[name]; ok {
			return p, nil
		}
		return nil, fmt.Errorf("%w: no pool is named %q; there are %s", volume.ErrInvalid, name, s.names())
	}
	if p, ok := s.byName[legacyName]; ok {
		return p, nil
	}
	if len(s.pools) == 1 {
		return s.pools[0], nil
	}
	return nil, fmt.Errorf("%w: no pool is named; choose one of %s", volume.ErrInvalid, s.names())
}

func (s *Set) names() string {
	var names []string
	for _, p := range s.pools {
		names = append(names, fmt.Sprintf("%q", p.config.Name))
	}
	return strings.Join(names, ", ")
}

// Capacity is how many bytes a pool can still promise; 0 for one that does not
// serve. The only error is ErrInvalid for a pool that is not configured.
func (s *Set) Capacity(name volume.PoolName, multiNode bool) (int64, error) {
	p, err := s.pool(name)
	if err != nil {
		return 0, err
	}
	if multiNode && !p.config.MultiNode() {
		return 0, nil
	}
	return p.free(), nil
}

// Shared reports whether a pool is served by several nodes.
func (s *Set) Shared(name volume.PoolName) (bool, error) {
	p, err := s.pool(name)
	if err != nil {
		return false, err
	}
	return p.config.Shared, nil
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
	v.visit.close()
}

// use is how this node uses the volume.
func (v *found) use() *use.Volume {
	return &use.Volume{Pool: v.visit.scan(), ID: v.id, Entry: v.entry, Dir: v.dir}
}

// find searches for a volume: in the named pool, or in the one that is known to have
// it, or in all. It answers ErrNotFound only if every pool could be asked, for a
// volume of a pool that is away is not gone.
func (s *Set) find(id volume.ID, name volume.PoolName) (*found, error) {
	if name != (volume.PoolName{}) {
		p, err := s.pool(name)
		if err != nil {
			return nil, err
		}
		return findIn([]*Pool{p}, id)
	}
	// Not the others, of which one may be about to hang.
	v, err := findIn(s.holders(id), id)
	if !errors.Is(err, volume.ErrNotFound) {
		return v, err
	}
	return findIn(s.pools, id)
}

// Holder names the pool that is known to have a volume, from memory. It answers false for
// none, and for several.
func (s *Set) Holder(id volume.ID) (volume.PoolName, bool) {
	holders := s.holders(id)
	if len(holders) != 1 {
		return volume.PoolName{}, false
	}
	return holders[0].config.Name, true
}

// holders are the pools whose index has a volume.
func (s *Set) holders(id volume.ID) []*Pool {
	var holders []*Pool
	for _, p := range s.pools {
		if p.ledger.Known(id).Exists() {
			holders = append(holders, p)
		}
	}
	return holders
}

func findIn(pools []*Pool, id volume.ID) (*found, error) {
	var at *found
	var unavailable []error
	for _, p := range pools {
		v, err := p.find(id)
		switch {
		case err != nil:
			unavailable = append(unavailable, err)
		case v != nil && at != nil:
			first := at.visit.pool.config.Name
			v.close()
			at.close()
			return nil, fmt.Errorf("%s %w: %q and %q; move one of the two away", id.Named(), volume.ErrAmbiguous, first, p.config.Name)
		case v != nil:
			at = v
		}
	}
	switch {
	case at != nil:
		return at, nil
	case len(unavailable) > 0:
		return nil, fmt.Errorf("%s: %w", id.Named(), errors.Join(unavailable...))
	}
	return nil, fmt.Errorf("%s: %w", id.Named(), volume.ErrNotFound)
}

// find answers nil if the pool has no such volume.
func (p *Pool) find(id volume.ID) (*found, error) {
	s, err := p.enter()
	if err != nil {
		return nil, err
	}
	e, d, err := s.scan().Lookup(id)
	if err != nil || !e.Exists() {
		s.close()
		return nil, err
	}
	return &found{id: id, visit: s, entry: e, dir: d}, nil
}

// findSettled is find for callers that hold no lock. A record without a directory is a
// moment of making and removing a volume: only what is so under the lock is lost.
func (s *Set) findSettled(id volume.ID) (*found, error) {
	v, err := s.find(id, volume.PoolName{})
	if err != nil || !v.entry.Lost() {
		return v, err
	}
	v.entry, v.dir, err = v.visit.scan().LookupSettled(id)
	if err == nil && !v.entry.Exists() {
		err = fmt.Errorf("%s: %w: it is being made or removed", id.Named(), volume.ErrNotFound)
	}
	if err != nil {
		v.close()
		return nil, err
	}
	return v, nil
}
