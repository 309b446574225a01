package serve

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Visit is one call's work in a pool: the pool's directories, and who enforces the sizes of
// its volumes, both as they were when it began.
type Visit struct {
	Pool     *Pool
	Store    *store.Store
	Enforcer *limit.Enforcer
	calls    *atomic.Int64 // counts this one; nil for a check
	// stepped is called after each step of a check, from when its pool is guarded.
	stepped func()
	// reading is what View has made.
	reading *reconcile.View
}

// Close ends the work.
func (in *Visit) Close() {
	in.Store.Close()
	if in.calls != nil {
		in.Pool.callEnded(in.calls)
	}
}

// Enter opens the pool for one call and makes sure that it is the one that was
// opened at first, and not the bare directory below a mount that went away. It waits for a disk, but not as long as
// ctx allows.
func (p *Pool) Enter(ctx context.Context) (v *Visit, err error) {
	// The state first: once it says that the pool serves, there is an identity.
	st, id := p.state.Load(), p.identity.Load()
	if err := p.closed(st, id); err != nil {
		return nil, err
	}
	id.calls.Add(1) // before the pool is opened: see replaced
	defer func() {
		if err != nil {
			p.callEnded(id.calls)
			err = p.Unavailable(err)
		}
	}()
	if p.ending.Load() {
		return nil, errEnding
	}
	if now := p.identity.Load(); now == nil || now.calls != id.calls {
		return nil, ErrNotChecked // a check opens the pool anew, and counted the calls before this one
	}
	if v, err = p.openCached(id); err != nil {
		// The checks of the pool may not have warned the caller yet. What is opened after all is closed by itself.
		v, err = inTime(ctx, p, st, func() (*Visit, error) { return p.visit(id) }, func(in *Visit, err error) {
			if err == nil {
				in.Close()
			}
		})
	}
	if err != nil {
		return nil, err
	}
	v.calls = id.calls
	return v, nil
}

// enter is Enter for background work: what is being opened is closed before that has ended, and so before Close returns.
func (p *Pool) enter() (*Visit, error) { return p.Enter(context.Background()) }

// closed is why no call may begin in the pool, as the last checks have found; nil if it may.
func (p *Pool) closed(st *state, id *opened) error {
	// What cannot be read from the disk any more may still be cached, and must not be served.
	if st.err != nil && (id == nil || st.hung || errors.Is(st.err, reconcile.ErrUnreadable) || errors.Is(st.err, reconcile.ErrNested)) {
		return st.err
	}
	if p.hung.Load() == st {
		return p.hangs()
	}
	if id == nil {
		return p.Unavailable(ErrNotChecked) // as replaced has it for a moment
	}
	if !p.checks.guarded.Load() {
		return p.Unavailable(cmp.Or(st.err, errUnguarded))
	}
	if err := p.Limits().MustNotServe(id.enforcer); err != nil && !st.readOnly() {
		return p.Unavailable(err)
	}
	return nil
}

// openCached opens the pool from memory, where that is possible: see store.OpenCached.
func (p *Pool) openCached(id *opened) (*Visit, error) {
	s, err := store.OpenCached(p.directory.at, id.Identity, p.directory.root.Load(), p.directory.needMount.Load())
	if err != nil {
		return nil, err
	}
	return &Visit{Pool: p, Store: s, Enforcer: id.enforcer}, nil
}

// visit opens the pool that was opened before.
func (p *Pool) visit(id *opened) (*Visit, error) {
	s, err := store.Open(p.directory.at, id.Identity)
	if err != nil {
		return nil, err
	}
	return &Visit{Pool: p, Store: s, Enforcer: id.enforcer}, nil
}

// inTime gives up on a filesystem that hangs, so that the call returns and releases its volume. Later calls then do not wait at
// all, until a check has found another state than st. A call with an earlier deadline gets the same answer before that deadline, but
// proves nothing to other calls.
func inTime[T any](ctx context.Context, p *Pool, st *state, do func() (T, error), late func(T, error)) (T, error) {
	limit := patience(ctx, p.Options.HangAfter)
	answer, err := hang.Run(ctx, limit, do, late)
	switch {
	case !errors.Is(err, hang.ErrTimeout):
	case limit < p.Options.HangAfter:
		err = p.Unavailable(hang.Stuck(limit))
	default:
		p.hung.Store(st)
		err = p.hangs()
	}
	return answer, err
}

// patience is how long a call waits: most, or nine tenths of the time that its caller has. A disk that
// is merely busy may take a second: a caller that has less gets no answer.
func patience(ctx context.Context, most time.Duration) time.Duration {
	deadline, ok := ctx.Deadline()
	if left := time.Until(deadline); ok && left >= time.Second {
		return min(most, left-left/10)
	}
	return most
}

// Health is what is wrong with a volume; nil for nothing. It does not wait for a filesystem that hangs. Errors: ErrNotFound,
// ErrBusy while a call makes or removes the volume, ErrUnavailable for a pool that does not serve or hangs.
func (p *Pool) Health(ctx context.Context, id volume.ID) ([]health.Condition, error) {
	found, err := inTime(ctx, p, p.state.Load(), func() ([]health.Condition, error) {
		v, err := p.Enter(ctx)
		if err != nil {
			return nil, err
		}
		defer v.Close()
		return v.View().Health(id)
	}, nil)
	if !errors.Is(err, volume.ErrNotFound) || !p.Ledger.Known(id).Exists() {
		return found, err
	}
	if last, ill := p.surveys.ill(id); ill && last.Lost {
		return health.Facts{Volume: id.String(), Missing: true}.Conditions(), nil
	}
	return nil, busy(id)
}

// View is the pool for reading it. A call asks for it several times.
func (in *Visit) View() *reconcile.View {
	if in.reading == nil || in.reading.Enforcer != in.Enforcer {
		in.reading = in.Pool.View()
		in.reading.Store, in.reading.Enforcer, in.reading.Lock = in.Store, in.Enforcer, in.tryLock
		in.reading.Stepped = in.step
	}
	return in.reading
}

func (in *Visit) step() {
	if in.stepped != nil {
		in.stepped()
	}
}

// View is what memory has of the pool.
func (p *Pool) View() *reconcile.View {
	s := &reconcile.View{
		Config: &p.Config, Node: p.Options.Node, Host: p.Options.Host(p.Log), Ledger: p.Ledger, Peers: &p.peers, Errors: p.state.Load().errors,
		SinceBoot: p.Options.SinceBoot,
		Strays:    p.searches.strayed,
		Steps:     &p.checks.steps, Log: p.Log, Failed: p.problems.failed, Left: p.problems.left,
	}
	if id := p.identity.Load(); id != nil {
		s.Enforcer = id.enforcer
	}
	return s
}

// Discard is the pool for undoing creations and for the trash. Work has to be called before.
func (in *Visit) Discard() *reconcile.Leftovers {
	return &reconcile.Leftovers{In: in.View(), UnlessBusy: in.unlessBusyOr}
}

// Repair is the pool for bringing its volumes in line with their records.
func (in *Visit) Repair() *reconcile.Repairs {
	return &reconcile.Repairs{
		In: in.View(), UnlessBusy: in.Pool.unlessBusy, UnlessBusyAnywhere: in.unlessBusyOr, UnlessPromising: in.unlessPromising,
	}
}

// Use is how this node uses a volume.
func (in *Visit) Use(id volume.ID, e store.Entry, d *dir.Dir) *reconcile.VolumeUse {
	marked := func() (bool, error) { return true, nil }
	if in.Pool.Config.Shared {
		marked = func() (bool, error) { return in.Store.Nodes().IsMarked(id) }
	}
	return &reconcile.VolumeUse{Host: in.View().Host, Root: in.Store.Root(), ID: id, Entry: e, Dir: d, Marked: marked}
}

// Work opens what only calls that make volumes need. Errors: store.ErrNoRoom.
func (in *Visit) Work() error {
	if err := in.Store.OpenWork(); err != nil {
		return in.Pool.Unavailable(err)
	}
	return nil
}

// Making has what a call is about to make remembered: see served.Note. A node whose own disk cannot be written goes on
// without.
func (in *Visit) Making() (done func()) {
	done, err := in.Pool.note.Making(in.Pool.noted(in.Pool.identity.Load()))
	if err != nil {
		in.Pool.Log.Error(err, errForgotten)
	}
	return done
}

// OthersAreRead returns ErrUnavailable while another pool is being opened that may be on the same
// filesystem: what it has promised is not known yet, and would be promised again. It is known
// when its first check ends. If that gets nowhere, the mount table says which pools have to wait for it.
func (p *Pool) OthersAreRead() error {
	for _, other := range p.Node.Pools {
		if other == p || p.Node.filesystems.Apart(p, other) {
			continue
		}
		if errors.Is(other.state.Load().err, ErrNotChecked) || p.awaits(other) {
			return p.Unavailable(fmt.Errorf("pool %q is being opened, which may be on the same filesystem: what it has promised is not known yet", other.Config.Name))
		}
	}
	return nil
}

// awaits reports whether another pool hangs before it was read, and is on this one's filesystem by the mount table, which no disk can
// delay. Of one whose path cannot even be opened that is not known.
func (p *Pool) awaits(other *Pool) bool {
	here, there := p.Where(), other.Where()
	return other != p && other.state.Load().hung && other.Ledger.Unread() && here != nil && there != nil && here.At.SameFilesystem(there.At)
}
