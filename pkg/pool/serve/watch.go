package serve

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

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

// watch checks the pool until ctx ends and the check that is under way has come
// back. Each check has its own goroutine, so that a filesystem that hangs holds that
// one, and callers learn of it.
func (p *Pool) watch(ctx context.Context) {
	first := sync.OnceFunc(func() { close(p.checked) })
	for ctx.Err() == nil {
		p.await(hang.Start(func() (state, error) { return p.check(ctx), nil }), first)
		first()
		p.rest(ctx)
	}
	p.leave()
}

// await settles what a check finds. It calls late for one that takes long; one that also
// gets nowhere counts as a hang until it comes back.
func (p *Pool) await(check *hang.Call[state], late func()) {
	for {
		st, err := check.WaitWhile(context.Background(), p.Options.HangAfter, p.steps.Load, late)
		if err == nil {
			p.settle(st)
			return
		}
		p.settle(state{hung: true, errors: volume.Unknown, err: p.Unavailable(err)})
		late()
	}
}

func (p *Pool) hangs() error { return p.Unavailable(hang.Stuck(p.Options.HangAfter)) }

// checkNow has the next check come without the rest before it.
func (p *Pool) checkNow() {
	select {
	case p.nudge <- struct{}{}:
	default: // it will
	}
}

func (p *Pool) rest(ctx context.Context) {
	pause := p.Options.CheckEvery
	if st := p.state.Load(); st.err != nil {
		pause = p.Options.RetryEvery
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.nudge:
	case <-ctx.Done():
	}
}

// settle publishes a check's result and logs transitions.
func (p *Pool) settle(st state) {
	old := p.state.Swap(&st)
	if st.err != nil || st.errors > old.errors && old.errors != volume.Unknown {
		p.noteError()
	}
	switch {
	case st.err != nil && (old.err == nil || old.err.Error() != st.err.Error()):
		p.Log.Error(st.err, "Pool does not serve", "path", p.Config.Path, "reason", st.reason())
	case st.err == nil && old.err != nil:
		p.logServing(st)
	}
	if st.errors > max(0, old.errors) {
		p.Log.Error(errFilesystem, "The pool's filesystem reports errors; all its volumes are abnormal until the error count is reset", "errors", st.errors)
	}
	if st.err == nil {
		p.wakeReaper()
	}
}

func (p *Pool) logServing(st state) {
	log := p.Log.WithValues("path", p.Config.Path, "volumes", p.Status().Volumes, "systemDisk", st.systemDisk)
	id := p.identity.Load()
	if id.keeper.Unenforced() != nil {
		log.Info("Pool serves; volume sizes are promised but not enforced", "why", id.keeper.Unenforced().Error())
		return
	}
	log.Info("Pool serves; the kernel enforces volume sizes", "quota", id.keeper.Kind())
}

// check opens the pool at first, and later makes sure that it is still there.
func (p *Pool) check(ctx context.Context) state {
	p.noteWhere()
	s, err := p.checkVisit(ctx)
	if p.where.Load() == nil {
		p.noteWhere() // it was made
	}
	if err != nil {
		p.distrustMount()
		return state{err: p.Unavailable(err), errors: volume.Unknown}
	}
	defer s.Close()
	root, err := s.Store.Root().Way()
	if err != nil {
		return state{err: p.Unavailable(err), errors: volume.Unknown}
	}
	p.root.Store(&root)
	space, err := s.Store.Space()
	if err != nil {
		return state{err: p.Unavailable(err), errors: volume.Unknown}
	}
	s.noteVacancy()
	p.unrecovered = p.unrecovered || space.ReadOnly
	joined, err := s.join(p.identity.Load().Format)
	if err != nil {
		return state{err: p.Unavailable(err), errors: volume.Unknown}
	}
	if joined { // it was unmounted, and is on another device now
		s.count()
	}
	s.Scan().LearnForeign(space)
	s.remember(p.identity.Load())
	return state{systemDisk: reconcile.OnSystemDisk(p.Options.Mounts, p.Options.SystemPath, s.Store.Root()), space: &space, errors: reconcile.CountErrors(p.Options.CountErrors, s.Store.Root())}
}

// distrustMount has calls make sure themselves that it is the pool, and not by the mount that a check found it by.
func (p *Pool) distrustMount() {
	if root := p.root.Load(); root != nil {
		p.root.Store(&dir.Way{ID: root.ID, MountRoot: root.MountRoot})
	}
}

// noteWhere notes the directory at the pool's path, also of a pool that another driver serves.
func (p *Pool) noteWhere() {
	root, err := dir.Open(p.Config.Path)
	if err != nil {
		return
	}
	defer func() { _ = root.Close() }()
	id, err := root.ID()
	if err != nil {
		return
	}
	at, err := p.Options.Mounts.Locate(root)
	if err != nil {
		at = bind.Place{} // in a mount of another namespace; the id counts
	}
	p.where.Store(&bind.Root{ID: id, At: at})
}

// WhereNow is Where, found anew. Errors: volume.ErrUnavailable for a pool that hangs.
func (p *Pool) WhereNow() (*bind.Root, error) {
	_, err := hang.Run(context.Background(), p.Options.HangAfter, func() (struct{}, error) { p.noteWhere(); return struct{}{}, nil }, nil)
	if errors.Is(err, hang.ErrTimeout) {
		err = p.hangs()
	}
	return p.Where(), err
}

func (p *Pool) checkVisit(ctx context.Context) (*Visit, error) {
	id := p.identity.Load()
	if id == nil {
		return p.open(ctx)
	}
	v, err := p.visit(id)
	if err != nil {
		if replaced, replaceErr := p.replaced(id, err); !replaced {
			return nil, errors.Join(err, replaceErr)
		}
		return p.open(ctx)
	}
	v.Store.ProbeWritable()
	p.refuses.Store(v.Store.Refuses())
	err = v.guardPool(id.Format.UUID)
	if err == nil {
		err = p.place.Check(v.Store.Root())
	}
	if err == nil {
		err = v.checkOpen(ctx)
	}
	if err != nil {
		v.Close()
		return nil, err
	}
	return v, nil
}

// checkOpen checks a pool that is open.
func (v *Visit) checkOpen(ctx context.Context) error {
	// What calls read may all be in memory. Their first write would be the one to hang.
	if err := v.Store.ProbeDisk(); err != nil {
		return fmt.Errorf("%w: %w", reconcile.ErrUnreadable, err)
	}
	if err := v.checkQuota(); err != nil {
		return err
	}
	recovered, err := v.recoverAgain(ctx)
	if err != nil || !recovered && time.Since(v.Pool.synced) < v.Pool.Options.SyncEvery {
		return err
	}
	v.Pool.synced = time.Now()
	return v.recover(ctx, eachMinute)
}
