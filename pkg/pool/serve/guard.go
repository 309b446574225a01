package serve

import (
	"errors"
)

var errUnguarded = errors.New("another driver may have begun to serve it")

// guardPool makes sure that no other driver serves the pool, unless it is shared.
func (v *Visit) guardPool(uuid string) error {
	if v.Pool.Config.Shared {
		v.meetNodes()
		return nil
	}
	err := v.Pool.guard.Acquire(v.Store, uuid)
	v.Pool.guarded.Store(err == nil)
	contender := v.Pool.guard.Contender()
	v.Pool.contender.Store(&contender)
	return err
}

// meetNodes shows the other nodes of a shared pool that this one is alive, and checks which of
// them are. A pool that is full or read-only is served all the same.
func (v *Visit) meetNodes() {
	if err := errors.Join(v.Store.Nodes().ShowAlive(), v.Store.Nodes().EachSign(v.Pool.peers.See)); err != nil {
		v.Pool.Log.V(4).Info("Failed to write or read who is alive", "err", err.Error())
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
	defer v.Close()
	v.remember(id)
	p.guard.Withdraw(v.Store)
}
