package serve

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// checks open a pool and look again and again whether it can be served. But for what is atomic, their fields belong to the goroutine
// of the check that is under way.
type checks struct {
	pool  *Pool
	nudge chan struct{} // one token: the next check is to come now
	done  chan struct{} // closed after the first check
	// steps counts what a check has done, by which one that is slow differs from one that hangs.
	steps atomic.Uint64
	// unrecovered says that the pool is to be recovered once it can be: it was read-only, or something was skipped.
	unrecovered bool
	// skipped says that something was left to a call that was at work, here or on another node, which may hang; and tried when that was.
	skipped bool
	tried   time.Time
	synced  time.Time // when the index was last compared with the disk
	// unrestored are volumes whose limits are to be compared with their promises.
	unrestored   map[volume.ID]struct{}
	limitsDiffer atomic.Bool  // a survey found a limit that is not what was promised
	unrestorable atomic.Int64 // how many of those that were compared last could not be restored
	// vacant says that the last check found no volume, record or trash in the pool, and giveUp releases the pool's uuid.
	vacant bool
	giveUp func()
	// refuses says that the filesystem refused changes at the last check, and does not say so.
	refuses atomic.Bool

	guard     Guard
	guardedAt time.Time   // when that was asked last
	guarded   atomic.Bool // no other driver serves the pool, or, if it is shared, none to which it is not
}

// state is what the last check of a pool found.
type state struct {
	err  error // why the pool does not serve; nil if it does
	hung bool  // the check itself has not come back
	// systemDisk: the pool shares its filesystem with the operating system.
	systemDisk bool
	// space is the filesystem's; nil if the pool does not serve.
	space *dir.Space
	// errors is how many the filesystem has counted, or volume.Unknown.
	errors int64
}

func (s *state) readOnly() bool { return s.space != nil && s.space.ReadOnly }

var errFilesystem = errors.New("what is on the disk, or the disk, is damaged; the kernel's log has more")

// ErrNotChecked reports a pool whose first check has not ended.
var ErrNotChecked = errors.New("it is being opened")

// watch checks the pool until ctx ends and the check that is under way has come back. Each check has its own goroutine, so that a
// filesystem that hangs holds that one, and callers learn of it.
func (c *checks) watch(ctx context.Context) {
	first := sync.OnceFunc(func() { close(c.done) })
	for ctx.Err() == nil {
		c.await(hang.Start(func() (state, error) { return c.check(ctx), nil }), first)
		first()
		c.rest(ctx)
	}
	c.pool.leave()
}

// await settles what a check finds. It calls late for one that takes long; one that also
// gets nowhere counts as a hang until it comes back.
func (c *checks) await(check *hang.Call[state], late func()) {
	for {
		st, err := check.WaitWhile(context.Background(), c.pool.Options.HangAfter, c.steps.Load, late)
		if err == nil {
			c.settle(st)
			return
		}
		c.settle(state{hung: true, errors: volume.Unknown, err: c.pool.Unavailable(err)})
		late()
	}
}

func (p *Pool) hangs() error { return p.Unavailable(hang.Stuck(p.Options.HangAfter)) }

// now has the next check come without the rest before it.
func (c *checks) now() {
	select {
	case c.nudge <- struct{}{}:
	default: // it will
	}
}

func (c *checks) rest(ctx context.Context) {
	pause := c.pool.Options.CheckEvery
	if st := c.pool.state.Load(); st.err != nil {
		pause = c.pool.Options.RetryEvery
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.nudge:
	case <-ctx.Done():
	}
}

// settle publishes a check's result and logs transitions.
func (c *checks) settle(st state) {
	old := c.pool.state.Swap(&st)
	if st.err != nil || st.errors > old.errors && old.errors != volume.Unknown {
		c.pool.problems.note()
	}
	switch {
	case st.err != nil && (old.err == nil || old.err.Error() != st.err.Error()):
		c.pool.Log.Error(st.err, "Pool does not serve", "path", c.pool.Config.Path, "reason", st.reason())
	case st.err == nil && old.err != nil:
		c.logServing(st)
	}
	if st.errors > max(0, old.errors) {
		c.pool.Log.Error(errFilesystem, "The pool's filesystem reports errors; all its volumes are abnormal until the error count is reset", "errors", st.errors)
	}
	if st.err == nil {
		c.pool.Ledger.Trash().Wake()
	}
}

func (c *checks) logServing(st state) {
	log := c.pool.Log.WithValues("path", c.pool.Config.Path, "volumes", c.pool.Status().Volumes, "systemDisk", st.systemDisk)
	id := c.pool.identity.Load()
	if id.enforcer.Unenforced() != nil {
		log.Info("Pool serves; volume sizes are promised but not enforced", "why", id.enforcer.Unenforced().Error())
		return
	}
	log.Info("Pool serves; the kernel enforces volume sizes", "quota", id.enforcer.Kind())
}

// check opens the pool at first, and later makes sure that it is still there.
func (c *checks) check(ctx context.Context) state {
	c.pool.directory.noteWhere()
	s, err := c.enter(ctx)
	if c.pool.directory.where.Load() == nil {
		c.pool.directory.noteWhere() // it was made
	}
	if err != nil {
		c.pool.directory.distrustMount()
		return state{err: c.pool.Unavailable(err), errors: volume.Unknown}
	}
	defer s.Close()
	root, err := dir.WayOf(s.Store.Root())
	if err != nil {
		return state{err: c.pool.Unavailable(err), errors: volume.Unknown}
	}
	c.pool.directory.root.Store(&root)
	space, err := s.Store.Space()
	if err != nil {
		return state{err: c.pool.Unavailable(err), errors: volume.Unknown}
	}
	c.noteVacancy(s)
	c.unrecovered = c.unrecovered || space.ReadOnly
	joined, err := s.join(c.pool.identity.Load().Format)
	if err != nil {
		return state{err: c.pool.Unavailable(err), errors: volume.Unknown}
	}
	if joined { // it was unmounted, and is on another device now
		s.count()
	}
	s.View().Usage().LearnForeign(space)
	s.remember(c.pool.identity.Load())
	return state{systemDisk: reconcile.OnSystemDisk(c.pool.Options.Mounts, c.pool.Options.SystemPath, s.Store.Root()), space: &space, errors: reconcile.CountErrors(c.pool.Options.CountErrors, s.Store.Root())}
}

// distrustMount has calls make sure themselves that it is the pool, and not by the mount that a check found it by.
func (d *directory) distrustMount() {
	if root := d.root.Load(); root != nil {
		d.root.Store(&dir.Way{ID: root.ID, MountRoot: root.MountRoot})
	}
}

// noteWhere notes the directory at the pool's path, also of a pool that another driver serves.
func (d *directory) noteWhere() {
	root, err := dir.Open(d.pool.Config.Path)
	if err != nil {
		return
	}
	defer func() { _ = root.Close() }()
	id, err := root.ID()
	if err != nil {
		return
	}
	at, err := d.pool.Options.Mounts.Locate(root)
	if err != nil {
		at = bind.Place{} // in a mount of another namespace; the id counts
	}
	d.where.Store(&bind.Root{ID: id, At: at})
}

// WhereNow is Where, found anew. Errors: volume.ErrUnavailable for a pool that hangs.
func (p *Pool) WhereNow() (*bind.Root, error) {
	_, err := hang.Run(context.Background(), p.Options.HangAfter, func() (struct{}, error) { p.directory.noteWhere(); return struct{}{}, nil }, nil)
	if errors.Is(err, hang.ErrTimeout) {
		err = p.hangs()
	}
	return p.Where(), err
}

func (c *checks) enter(ctx context.Context) (*Visit, error) {
	id := c.pool.identity.Load()
	if id == nil {
		return c.open(ctx)
	}
	v, err := c.pool.visit(id)
	if err != nil {
		if replaced, replaceErr := c.replaced(id, err); !replaced {
			return nil, errors.Join(err, replaceErr)
		}
		return c.open(ctx)
	}
	v.Store.ProbeWritable()
	c.refuses.Store(v.Store.Refuses())
	err = c.guardPool(v, id.Format.UUID)
	if err == nil {
		err = c.pool.directory.place.Check(v.Store.Root())
	}
	if err == nil {
		err = c.checkOpen(ctx, v)
	}
	if err != nil {
		v.Close()
		return nil, err
	}
	return v, nil
}

// checkOpen checks a pool that is open.
func (c *checks) checkOpen(ctx context.Context, in *Visit) error {
	// What calls read may all be in memory. Their first write would be the one to hang.
	if err := in.Store.ProbeDisk(); err != nil {
		return fmt.Errorf("%w: %w", reconcile.ErrUnreadable, err)
	}
	if err := c.checkQuota(in); err != nil {
		return err
	}
	recovered, err := c.recoverAgain(ctx, in)
	if err != nil || !recovered && time.Since(c.synced) < in.Pool.Options.SyncEvery {
		return err
	}
	c.synced = time.Now()
	return in.recover(ctx, eachMinute)
}
