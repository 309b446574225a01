package pool

import (
	"errors"
	"fmt"
	"os"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/alive"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
)

// One driver at a time serves a pool that is not shared. Against others of its node it locks a
// byte of the node's /dev/null: a lock in the pool would keep its filesystem in use. Against
// those of other nodes, which have the same directory by NFS, it writes a sign of life.

const (
	// aliveFor is how long a driver of another node counts as alive after its sign of life has
	// changed, by the clock of this process: a sign comes with each check.
	aliveFor = 30 * time.Second
	// tryToServe is for those who inspect the pool, and hold the lock for an instant.
	tryToServe = 50 * time.Millisecond
)

// A guard keeps other drivers from serving the pool. It belongs to the checks, but for what
// the pool has apart.
type guard struct {
	self store.Server
	uuid string // of the pool that is locked, or waited for
	// unlock gives up the lock of the node, and stopWaiting the place of who waits for it;
	// nil without.
	unlock, stopWaiting func()
	signs               alive.Signs
}

var errUnguarded = errors.New("another driver may have begun to serve it")

// guardPool makes sure that no other driver serves the pool.
func (v *visit) guardPool(uuid string) error {
	p := v.pool
	if p.config.Shared {
		v.meetNodes()
		return nil
	}
	err := v.lockNode(uuid)
	if err == nil {
		err = v.claimPool()
	}
	p.guarded.Store(err == nil)
	return err
}

// meetNodes shows the other nodes of a shared pool that this one is alive, and looks which of
// them are. A pool that is full or read-only is served all the same.
func (v *visit) meetNodes() {
	if err := errors.Join(v.store.ShowAlive(), v.store.SeeOthers()); err != nil {
		v.pool.log.V(4).Info("failed to write or read who is alive", "err", err.Error())
	}
}

// lockNode keeps other drivers of this node from serving the pool until unguard.
func (v *visit) lockNode(uuid string) error {
	g, dev := &v.pool.guard, v.pool.options.Dev
	if g.uuid != uuid {
		v.pool.unguard() // another pool is at the path now
		g.uuid = uuid
	}
	if g.unlock != nil || dev == nil {
		return nil
	}
	at := store.ServerByte(uuid)
	began := time.Now()
	unlock, err := store.LockServer(dev, at)
	for errors.Is(err, dir.ErrLocked) && time.Since(began) < tryToServe {
		time.Sleep(time.Millisecond)
		unlock, err = store.LockServer(dev, at)
	}
	switch {
	case errors.Is(err, dir.ErrLocked):
		if g.stopWaiting == nil {
			g.stopWaiting, _ = store.LockServer(dev, at+1)
		}
		return v.served()
	case err != nil:
		v.pool.log.Error(err, "cannot tell whether another driver of this node serves the pool; serving it")
		unlock = func() {}
	}
	v.pool.unguard()
	g.unlock = unlock
	return nil
}

// claimPool writes the sign of life, unless a driver of another node does.
func (v *visit) claimPool() error {
	g := &v.pool.guard
	by, sign, err := v.store.Server()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	node := v.pool.options.Node.String()
	if sign != "" && by.Node != node && g.signs.Unchanged("server", sign) < aliveFor {
		return v.served()
	}
	if g.self.Instance == "" {
		host, _ := os.Hostname()
		g.self = store.Server{Node: node, Host: host, Since: time.Now().UTC().Truncate(time.Second), Instance: store.RandomSuffix()}
	}
	g.self.Beat++
	if err := v.store.WriteServer(&g.self); err != nil {
		// A pool that is full or read-only is served all the same.
		v.pool.log.V(4).Info("failed to write who serves the pool", "err", err.Error())
	}
	return nil
}

func (v *visit) served() error {
	by, _, err := v.store.Server()
	if err != nil {
		return store.ErrServed
	}
	return fmt.Errorf("%w: it is served by %s", store.ErrServed, by)
}

// unguard lets other drivers of this node serve the pool.
func (p *Pool) unguard() {
	for _, end := range []*func(){&p.guard.unlock, &p.guard.stopWaiting} {
		if *end != nil {
			(*end)()
			*end = nil
		}
	}
}

// leave lets other drivers serve the pool at once, at the end of the checks.
func (p *Pool) leave() {
	defer p.unguard()
	id := p.identity.Load()
	if !p.guarded.Load() || id == nil || p.state.Load().err != nil {
		return
	}
	v, err := p.visit(id)
	if err != nil {
		return
	}
	defer v.close()
	if by, _, err := v.store.Server(); err == nil && by.Instance == p.guard.self.Instance {
		_ = v.store.WriteServer(nil) // others wait a little longer without
	}
}
