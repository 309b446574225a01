package pool

import (
	"cmp"
	"context"
	"errors"
	"sync/atomic"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/pool/discard"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/nested"
	"kubevirt.io/hostpath-provisioner/pkg/pool/repair"
	"kubevirt.io/hostpath-provisioner/pkg/pool/scan"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
)

// A visit is one call's work in a pool: the pool's directories, and who enforces the sizes of
// its volumes, both as they were when it began.
type visit struct {
	pool   *Pool
	store  *store.Store
	keeper *limit.Keeper
	calls  *atomic.Int64 // counts this one; nil for a check
	// reading is what scan has made.
	reading *scan.Pool
}

func (v *visit) close() {
	v.store.Close()
	if v.calls != nil {
		v.calls.Add(-1)
	}
}

// enter opens the pool for one call and makes sure that it is the one that was
// opened at first, and not the bare directory below a mount that went away.
func (p *Pool) enter() (*visit, error) {
	// The state first: once it says that the pool serves, there is an identity.
	st, id := p.state.Load(), p.identity.Load()
	// What a disk cannot be asked for any more may be in memory, and must not deceive.
	if st.err != nil && (id == nil || st.hung || errors.Is(st.err, errUnreadable) || errors.Is(st.err, nested.ErrNested)) {
		return nil, st.err
	}
	if p.hung.Load() == st {
		return nil, p.hangs()
	}
	if id == nil {
		return nil, p.unavailable(errNotChecked) // as replaced has it for a moment
	}
	if !p.config.Shared && !p.guarded.Load() {
		return nil, p.unavailable(cmp.Or(st.err, errUnguarded))
	}
	if err := p.limits().Unfit(id.keeper); err != nil && !st.readOnly() {
		return nil, p.unavailable(err)
	}
	id.calls.Add(1) // before the pool is opened: see replaced
	v, err := p.openCached(id)
	if err != nil {
		v, err = p.openInTime(id, st)
	}
	if err != nil {
		id.calls.Add(-1)
		return nil, p.unavailable(err)
	}
	v.calls = id.calls
	return v, nil
}

// openCached opens the pool from memory, where that is possible: see store.OpenCached.
func (p *Pool) openCached(id *opened) (*visit, error) {
	s, err := store.OpenCached(p.at, id.Identity, p.root.Load(), p.needMount.Load())
	if err != nil {
		return nil, err
	}
	return &visit{pool: p, store: s, keeper: id.keeper}, nil
}

// visit opens the pool that was opened before.
func (p *Pool) visit(id *opened) (*visit, error) {
	s, err := store.Open(p.at, id.Identity)
	if err != nil {
		return nil, err
	}
	return &visit{pool: p, store: s, keeper: id.keeper}, nil
}

// openInTime is open for callers that the checks of the pool may not have warned yet:
// they, and the volumes that they hold, do not wait for a filesystem that hangs, and those
// that come after them not at all, until a check has found out more than st says. What is
// opened after all is closed by itself.
func (p *Pool) openInTime(id *opened, st *state) (*visit, error) {
	v, err := hang.Run(context.Background(), p.options.HangAfter, func() (*visit, error) { return p.visit(id) },
		func(v *visit, err error) {
			if err == nil {
				v.close()
			}
		})
	if errors.Is(err, hang.ErrTimeout) {
		p.hung.Store(st)
		err = p.hangs()
	}
	return v, err
}

// scan is the pool for reading it. A call asks for it several times.
func (v *visit) scan() *scan.Pool {
	if v.reading == nil || v.reading.Keeper != v.keeper {
		v.reading = v.pool.scan()
		v.reading.Store, v.reading.Keeper, v.reading.Lock = v.store, v.keeper, v.tryLock
	}
	return v.reading
}

// scan is what memory has of the pool.
func (p *Pool) scan() *scan.Pool {
	s := &scan.Pool{
		Config: &p.config, Node: p.options.Node, Host: p.host(), Ledger: p.ledger, Errors: p.state.Load().errors,
		SinceBoot: p.options.SinceBoot,
		Strays:    p.strayed,
		Steps:     &p.steps, Log: p.log, Failed: p.failed,
	}
	if id := p.identity.Load(); id != nil {
		s.Keeper = id.keeper
	}
	return s
}

// discard is the pool for undoing creations and for the trash. The directories of this node have
// to be open.
func (v *visit) discard() *discard.Pool {
	return &discard.Pool{Pool: v.scan(), UnlessBusy: v.unlessBusyOr, Thrown: v.pool.thrown, Wake: v.pool.wakeReaper}
}

// repair is the pool for bringing its volumes in line with their records.
func (v *visit) repair() *repair.Pool {
	return &repair.Pool{
		Pool: v.scan(), UnlessBusy: v.pool.unlessBusy, UnlessBusyAnywhere: v.unlessBusyOr, UnlessPromising: v.unlessPromising,
	}
}

// work opens what only calls that make volumes need. Errors: store.ErrNoRoom.
func (v *visit) work() error {
	if err := v.store.OpenWork(); err != nil {
		return v.pool.unavailable(err)
	}
	return nil
}

// workIfRoom is work that leaves the directories of this node for later if nothing more fits.
func (v *visit) workIfRoom() (open bool, err error) {
	err = v.work()
	if errors.Is(err, store.ErrNoRoom) {
		v.pool.unrecovered = true
		return false, nil
	}
	return err == nil, err
}
