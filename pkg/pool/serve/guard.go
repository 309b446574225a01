package serve

import (
	"errors"
	"sync/atomic"
	"time"
)

var errUnguarded = errors.New("another driver may have begun to serve it")

// guardPool makes sure that no other driver serves the pool, unless it is shared. A check that takes long does it again between its
// steps.
func (c *checks) guardPool(in *Visit, uuid string) (err error) {
	defer func() { c.guarded.Store(err == nil) }()
	c.guardedAt = time.Now()
	in.stepped = func() { // another driver takes the pool of one that is silent for longer
		if time.Since(c.guardedAt) >= in.Pool.Options.CheckEvery {
			_ = c.guardPool(in, uuid) // without it no call begins, and the next check says why
		}
	}
	if in.Pool.Config.Shared {
		in.meetNodes()
		return nil
	}
	return c.guard.Acquire(in.Store, uuid)
}

// meetNodes shows the other nodes of a shared pool that this one is alive, and checks which of
// them are. A pool that is full or read-only is served all the same.
func (in *Visit) meetNodes() {
	err := errors.Join(in.Store.Nodes().ShowAlive(), in.Store.Nodes().EachSign(in.Pool.peers.See))
	in.Pool.peers.Look(err == nil)
	if err != nil {
		in.Pool.Log.V(4).Info("Failed to write or read who is alive", "err", err.Error())
	}
}

var errEnding = errors.New("the driver is stopping")

// leave is called at the end of the checks. From then on no call begins in the pool. Those that are at work may go on until the
// process ends, and the last of them hands the pool over.
func (p *Pool) leave() {
	p.ending.Store(true)
	if id := p.identity.Load(); id == nil || id.calls.Load() == 0 {
		p.handOver()
	}
}

// callEnded is called when a call ends that was counted.
func (p *Pool) callEnded(calls *atomic.Int64) {
	if calls.Add(-1) == 0 && p.ending.Load() {
		p.handOver()
	}
}

// letOthersServe lets other drivers serve the pool at once.
func (p *Pool) letOthersServe() {
	defer p.checks.guard.Release()
	id := p.identity.Load()
	if p.Config.Shared || !p.checks.guarded.Load() || id == nil || p.state.Load().err != nil {
		return
	}
	v, err := p.visit(id)
	if err != nil {
		return
	}
	defer v.Close()
	v.remember(id)
	p.checks.guard.Withdraw(v.Store)
}
