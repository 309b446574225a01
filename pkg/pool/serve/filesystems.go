package serve

import (
	"cmp"
	"context"
	"errors"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
)

// onFilesystem are the pools on the filesystem of this one, and that itself, in the order of their
// names.
func (p *Pool) onFilesystem() []*Pool {
	pools := p.Node.filesystems.With(p)
	slices.SortFunc(pools, func(a, b *Pool) int { return cmp.Compare(a.Config.Name.String(), b.Config.Name.String()) })
	return pools
}

// readPromises has the promises of a pool that cannot be served count against its filesystem, as far
// as they can be read, and changes nothing in it. What cannot be read keeps the other pools there from
// promising anything. Another driver may go on in it, so it is read each minute.
func (c *checks) readPromises() {
	if !c.pool.Ledger.Unread() && time.Since(c.synced) < c.pool.Options.SyncEvery {
		return
	}
	root, err := dir.Open(c.pool.Config.Path)
	if err != nil {
		return // it is not here
	}
	defer func() { _ = root.Close() }()
	on, err := dir.SpaceIDOf(root)
	if err != nil || c.pool.directory.checkMount(root) != nil {
		return
	}
	s, f, err := store.OpenReadOnly(c.pool.directory.at)
	if errors.Is(err, store.ErrNoLayout) || errors.Is(err, reconcile.ErrNested) {
		return // no driver has made a pool of it
	}
	if err == nil {
		defer s.Close()
		err = c.readAll(s, f)
	}
	if err != nil {
		c.pool.Ledger.Join(c.pool.Node.filesystems.Settle(c.pool, on), ledger.Origin{Shared: c.pool.Config.Shared})
		c.pool.Log.V(2).Info("Failed to read what the pool has promised", "err", err.Error())
		return
	}
	c.synced = time.Now()
}

func (c *checks) readAll(s *store.Store, f *store.Format) error {
	id, err := c.identify(s, f)
	if err != nil {
		return err
	}
	v := &Visit{Pool: c.pool, Store: s, Enforcer: id.enforcer}
	if _, err := v.join(*f); err != nil {
		return err
	}
	c.pool.Ledger.SetOthersTrash(v.View().Index().AllTrash())
	return v.View().Index().Load()
}

// join has the promises of the pool count against the filesystem that it is on, with those of
// the other pools there. It reports whether that is another one than before.
func (in *Visit) join(f store.Format) (joined bool, err error) {
	on, err := dir.SpaceIDOf(in.Store.Root())
	if err != nil {
		return false, err
	}
	p := in.Pool
	trees, err := in.Enforcer.Trees(in.Store.Root(), p.Ledger)
	if err != nil {
		return false, err
	}
	space, err := in.Store.Space()
	if err != nil {
		return false, err
	}
	p.Ledger.SetCosts(in.Enforcer.Sizes.NewInodes(), in.Enforcer.Sizes.Costs())
	joined = p.Ledger.Join(p.Node.filesystems.Settle(p, on), ledger.Origin{Made: f.Created, Foreign: f.Foreign, Shared: p.Config.Shared, Size: space.SizeBytes})
	if joined {
		p.Ledger.SetTrees(trees)
		p.usage.beside.Store(newBeside())
	}
	if with := p.Ledger.Summary().SharesWith(); joined && len(with) > 0 {
		p.Log.Info("The pool shares its filesystem with others; the promises of all of them count", "with", with)
	}
	return joined, nil
}

// usage is what the volumes of a pool hold, in bytes, or volume.Unknown.
type usage struct {
	pool   *Pool
	bytes  atomic.Int64
	beside atomic.Pointer[beside]
}

// beside is what was last known to be of no volume on one filesystem.
type beside struct {
	others atomic.Pointer[reconcile.Others]
	asked  atomic.Bool // and there was no answer yet
}

// newBeside is of a filesystem that was not asked: all that is taken may be of no volume.
func newBeside() *beside {
	b := &beside{}
	b.others.Store(&reconcile.Others{Alone: math.MaxInt64})
	return b
}

// besideWithin is how long a count waits for the answer.
const besideWithin = time.Second

// ask asks the filesystem, and returns what is known. On XFS it is up to the users how long the kernel takes for it: without an answer in
// time the last one stays, and there is no second question until it comes. Held is what volumes and trash hold.
func (b *beside) ask(in *Visit, held reconcile.Held) (reconcile.Others, error) {
	root, err := in.Store.Root().Reopen()
	if err != nil {
		return reconcile.Others{}, err
	}
	if !b.asked.CompareAndSwap(false, true) {
		return *b.others.Load(), root.Close()
	}
	_, err = hang.Run(context.Background(), besideWithin, func() (struct{}, error) {
		defer b.asked.Store(false)
		all, err := in.Enforcer.Beside(root)
		others := held.Others(all)
		if errors.Is(err, quota.ErrTooMany) {
			others.Alone = max(others.Alone, b.others.Load().Alone)
		}
		if err == nil || errors.Is(err, quota.ErrTooMany) {
			b.others.Store(&others)
		}
		return struct{}{}, errors.Join(err, root.Close())
	}, nil)
	if errors.Is(err, quota.ErrTooMany) || errors.Is(err, hang.ErrTimeout) {
		in.Pool.Log.V(2).Info("What is beside the volumes counts as before", "err", err.Error())
		err = nil
	}
	return *b.others.Load(), err
}

// run counts what others hold, where quotas count what volumes hold, until ctx
// ends. It is apart from the checks at a pool: on a slow disk it may take a while. Of the pools
// on one filesystem one counts for all.
func (u *usage) run(ctx context.Context) {
	for reconcile.Rest(ctx, u.pool.Options.SyncEvery) == nil {
		if !u.countsForAll() {
			continue
		}
		s, err := u.pool.enter()
		if err != nil {
			continue
		}
		s.count()
		s.Close()
	}
}

// countsForAll reports whether the pool is the first on its filesystem that serves.
func (u *usage) countsForAll() bool {
	for _, other := range u.pool.onFilesystem() {
		if other == u.pool {
			return true
		}
		if other.state.Load().err == nil {
			return false
		}
	}
	return true // it was not opened yet
}

// trees is what the filesystem needs for its trees, for the pool there that has it need most: one may not have noticed yet that quotas
// were switched on, or may have promised nothing while they were.
func (in *Visit) trees() (most quota.Trees, err error) {
	for _, p := range in.Pool.onFilesystem() {
		enforcer := in.Enforcer
		if p != in.Pool {
			enforcer = cmp.Or(p.View().Enforcer, enforcer)
		}
		trees, err := enforcer.Trees(in.Store.Root(), p.Ledger)
		if err != nil {
			return most, err
		}
		if trees.Copies > most.Copies || trees.Copies == most.Copies && trees.Room.Bounded {
			most = trees
		}
	}
	return most, nil
}

// count takes what volumes and trash of all pools on the filesystem hold from what is taken. What a pool holds
// that cannot be entered now counts as foreign: then it is not all counted. If what is taken cannot be known now, the last number stays.
func (in *Visit) count() (all bool) {
	trees, err := in.trees()
	if err != nil {
		return false
	}
	counting := in.Pool.Ledger.BeginCount()
	// What was written or erased meanwhile counts as foreign until next time, and not
	// as free.
	var taken int64
	look := func() {
		space, spaceErr := in.Store.Space()
		err, taken = errors.Join(err, spaceErr), max(taken, space.TakenBytes())
	}
	look()
	var held reconcile.Held
	all = true
	for _, p := range in.Pool.onFilesystem() {
		one, entered, counts := p.usage.held(in, look)
		if !counts {
			in.Pool.Ledger.CannotCount(trees)
			in.measureExcess()
			return true
		}
		held.Add(one)
		all = all && entered
	}
	if look(); err != nil {
		return false
	}
	others, err := in.Pool.usage.beside.Load().ask(in, held)
	if err != nil {
		return false
	}
	counting.End(held.Foreign(taken, others, trees), trees)
	return all
}

// measureExcess measures what volumes of all pools on the filesystem take beyond their promises. That of a pool which cannot be entered now counts
// as before.
func (in *Visit) measureExcess() {
	for _, p := range in.Pool.onFilesystem() {
		v := in
		if p != in.Pool {
			var err error
			if v, err = p.enter(); err != nil {
				continue
			}
		}
		v.View().Usage().MeasureExcess()
		if v != in {
			v.Close()
		}
	}
}

// held is what the volumes and the trash of a pool hold, if that is counted. The visit
// is one of this pool, or of another on its filesystem. A pool that is not entered holds nothing.
func (u *usage) held(by *Visit, look func()) (all reconcile.Held, entered, counts bool) {
	v := by
	if v.Pool != u.pool {
		var err error
		if v, err = u.pool.enter(); err != nil {
			in := u.pool.View()
			if in.Enforcer == nil {
				in.Enforcer = by.Enforcer
			}
			return all, false, in.Usage().Counts()
		}
		defer v.Close()
	}
	all, counts = v.View().Usage().Held(&u.bytes, look)
	return all, true, counts
}
