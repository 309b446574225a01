// Package guard keeps a pool that is not shared to one driver at a time. Against others of its node it locks a byte
// of the node's /dev/null: a lock in the pool would keep its filesystem in use. Against those of other nodes, which
// have the same directory by NFS, it writes a sign of life.
package guard

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/alive"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

const (
	// aliveFor is how long a driver of another node counts as alive after its sign of life has
	// changed, by the clock of this process: a sign comes with each check.
	aliveFor = 30 * time.Second
	// tryToServe is for those who inspect the pool, and hold the lock for an instant.
	tryToServe = 50 * time.Millisecond
)

// A Guard keeps other drivers from serving a pool. It is for one goroutine at a time.
type Guard struct {
	// Dev is the node's /dev; nil for a node whose drivers are not locked out.
	Dev *dir.Dir
	// OwnDev: Dev is the container's own, and its locks say nothing of other drivers of the node. They
	// are known by their sign of life then, as those of other nodes.
	OwnDev bool
	Node   volume.NodeID
	Log    logr.Logger

	self store.Server
	uuid string // of the pool that is locked, or waited for
	// unlock gives up the lock of the node, and stopWaiting the place of who waits for it;
	// nil without.
	unlock, stopWaiting func()
	signs               alive.Signs
	// waiter is who waits for the pool, and waits since when it was seen to; nil for nobody.
	waiter *store.Server
	waits  time.Time
	logged bool
}

// Acquire makes sure that no other driver serves the pool of that uuid, and shows that this one does: it is
// called with each check. It returns store.ErrServed if another one does.
func (g *Guard) Acquire(s *store.Store, uuid string) error {
	err := g.lockNode(s, uuid)
	if err == nil {
		err = g.claim(s)
	}
	switch {
	case errors.Is(err, store.ErrServed):
		g.wait(s)
	case err == nil:
		g.meet(s)
	}
	return err
}

// wait shows the driver that serves the pool that this one is configured with it too.
func (g *Guard) wait(s *store.Store) {
	g.beat()
	if err := s.WriteWaiter(&g.self); err != nil {
		g.Log.V(4).Info("failed to write who waits for the pool", "err", err.Error())
	}
}

// meet notes who waits for the pool. What a driver left that waits no more is removed.
func (g *Guard) meet(s *store.Store) {
	by, sign, err := s.Waiter()
	if err != nil {
		g.waiter, g.logged = nil, false
		return
	}
	if by.Instance == g.self.Instance || g.signs.Unchanged("waiter", sign) >= aliveFor {
		g.waiter, g.logged = nil, false
		_ = s.WriteWaiter(nil) // tried again
		return
	}
	if g.waiter == nil {
		g.waits = time.Now()
	}
	g.waiter = &by
	if g.Contender() != "" && !g.logged {
		g.logged = true
		g.Log.Error(errContended, "two drivers are configured with the pool", "waits", by.String())
	}
}

var errContended = errors.New("another driver waits for it, and it is not shared")

// Contender is the driver that waits for the pool which this one serves; empty for none. One that
// waits in the update of a driver, for less than 30 seconds, is none.
func (g *Guard) Contender() string {
	if g.waiter == nil || time.Since(g.waits) < aliveFor {
		return ""
	}
	return g.waiter.String()
}

// lockNode keeps other drivers of this node from serving the pool until Release.
func (g *Guard) lockNode(s *store.Store, uuid string) error {
	if g.uuid != uuid {
		g.Release() // another pool is at the path now
		g.uuid = uuid
	}
	if g.unlock != nil || g.Dev == nil {
		return nil
	}
	at := store.ServerByte(uuid)
	began := time.Now()
	unlock, err := store.LockServer(g.Dev, at)
	for errors.Is(err, dir.ErrLocked) && time.Since(began) < tryToServe {
		time.Sleep(time.Millisecond)
		unlock, err = store.LockServer(g.Dev, at)
	}
	switch {
	case errors.Is(err, dir.ErrLocked):
		if g.stopWaiting == nil {
			g.stopWaiting, _ = store.LockServer(g.Dev, at+1)
		}
		return served(s)
	case err != nil:
		g.Log.Error(err, "cannot determine whether another driver of this node serves the pool; serving it")
		unlock = func() {}
	}
	g.Release()
	g.unlock = unlock
	return nil
}

// claim writes the sign of life, unless a driver of another node does.
func (g *Guard) claim(s *store.Store) error {
	by, sign, err := s.Server()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	other := by.Node != g.Node.String() || g.OwnDev && by.Instance != g.self.Instance
	if sign != "" && other && g.signs.Unchanged("server", sign) < aliveFor {
		return served(s)
	}
	g.beat()
	if err := s.WriteServer(&g.self); err != nil {
		// A pool that is full or read-only is served all the same.
		g.Log.V(4).Info("failed to write who serves the pool", "err", err.Error())
	}
	return nil
}

// beat makes the next sign of life.
func (g *Guard) beat() {
	if g.self.Instance == "" {
		host, _ := os.Hostname()
		g.self = store.Server{Node: g.Node.String(), Host: host, Since: time.Now().UTC().Truncate(time.Second), Instance: store.RandomSuffix()}
	}
	g.self.Beat++
}

func served(s *store.Store) error {
	by, _, err := s.Server()
	if err != nil {
		return store.ErrServed
	}
	return fmt.Errorf("%w: it is served by %s", store.ErrServed, by)
}

// Release lets other drivers of this node serve the pool.
func (g *Guard) Release() {
	for _, end := range []*func(){&g.unlock, &g.stopWaiting} {
		if *end != nil {
			(*end)()
			*end = nil
		}
	}
}

// Withdraw removes the sign of life, so that drivers of other nodes can serve the pool at once.
func (g *Guard) Withdraw(s *store.Store) {
	if by, _, err := s.Server(); err == nil && by.Instance == g.self.Instance {
		_ = s.WriteServer(nil) // others wait a little longer without
	}
}
