package pool

import (
	"errors"
	"sync/atomic"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A visit is one call's work in a pool: the pool's directories, and who enforces the sizes of
// its volumes, both as they were when it began.
type visit struct {
	pool   *Pool
	store  *store.Store
	keeper *limit.Keeper
	calls  *atomic.Int64 // counts this one; nil for a check
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
	if st.err != nil && (id == nil || st.hung || errors.Is(st.err, errUnreadable) || errors.Is(st.err, errNested)) {
		return nil, st.err
	}
	if p.hung.Load() == st {
		return nil, p.hangs()
	}
	if id == nil {
		return nil, p.unavailable(errNotChecked) // as replaced has it for a moment
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
	type result struct {
		visit *visit
		err   error
	}
	results, late := make(chan result), make(chan struct{})
	defer close(late)
	go func() {
		v, err := p.visit(id)
		select {
		case results <- result{v, err}:
		case <-late:
			if err == nil {
				v.close()
			}
		}
	}()
	timer := time.NewTimer(p.options.HangAfter)
	defer timer.Stop()
	select {
	case r := <-results:
		return r.visit, r.err
	case <-timer.C:
		p.hung.Store(st)
		return nil, p.hangs()
	}
}

// lookup reads what the disk has of a volume. The directory, if it is not nil, must be closed.
func (v *visit) lookup(id volume.ID) (store.Entry, *dir.Dir, error) {
	e, d, err := v.store.Lookup(id)
	if err != nil {
		err = v.pool.unavailable(err)
	}
	return e, d, err
}

// work opens what only calls that make or remove volumes need.
func (v *visit) work() error {
	if err := v.store.OpenWork(); err != nil {
		return v.pool.unavailable(err)
	}
	return nil
}

// lookupSettled is lookup for callers that hold no lock: of a volume that a call makes or
// removes at the moment, on whatever node, it answers that there is none.
func (v *visit) lookupSettled(id volume.ID) (store.Entry, *dir.Dir, error) {
	e, d, err := v.lookup(id)
	if err != nil || !e.Lost() {
		return e, d, err
	}
	unlock, err := v.tryLock(id)
	if errors.Is(err, volume.ErrBusy) {
		return store.Entry{}, nil, nil
	}
	if err != nil {
		return store.Entry{}, nil, err
	}
	defer unlock()
	return v.lookup(id)
}
