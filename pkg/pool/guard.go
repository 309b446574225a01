package pool

import (
	"errors"
)

var errUnguarded = errors.New("another driver may have begun to serve it")

// guardPool makes sure that no other driver serves the pool, unless it is shared.
func (v *visit) guardPool(uuid string) error {
	if v.pool.config.Shared {
		v.meetNodes()
		return nil
	}
	err := v.pool.guard.Acquire(v.store, uuid)
	v.pool.guarded.Store(err == nil)
	return err
}

// meetNodes shows the other nodes of a shared pool that this one is alive, and checks which of
// them are. A pool that is full or read-only is served all the same.
func (v *visit) meetNodes() {
	if err := errors.Join(v.store.ShowAlive(), v.store.SeeOthers()); err != nil {
		v.pool.log.V(4).Info("failed to write or read who is alive", "err", err.Error())
	}
}

// leave lets other drivers serve the pool at once, at the end of the checks.
func (p *Pool) leave() {
	defer p.guard.Release()
	id := p.identity.Load()
	if !p.guarded.Load() || id == nil || p.state.Load().err != nil {
		return
	}
	v, err := p.visit(id)
	if err != nil {
		return
	}
	defer v.close()
	p.guard.Withdraw(v.store)
}
