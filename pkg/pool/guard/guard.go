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
	Dev  *dir.Dir
	Node volume.NodeID
	Log  logr.Logger

	self store.Server
	uuid string // of the pool that is locked, or waited for
	// unlock gives up the lock of the node, and stopWaiting the place of who waits for it;
	// nil without.
	unlock, stopWaiting func()
	signs               alive.Signs
}

// Acquire makes sure that no other driver serves the pool of that uuid, and shows that this one does: it is
// called with each check. It answers store.ErrServed if another one does.
func (g *Guard) Acquire(s *store.Store, uuid string) error {
	if err := g.lockNode(s, uuid); err != nil {
		return err
	}
	return g.claim(s)
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
		g.Log.Error(err, "cannot tell whether another driver of this node serves the pool; serving it")
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
	node := g.Node.String()
	if sign != "" && by.Node != node && g.signs.Unchanged("server", sign) < aliveFor {
		return served(s)
	}
	if g.self.Instance == "" {
		host, _ := os.Hostname()
		g.self = store.Server{Node: node, Host: host, Since: time.Now().UTC().Truncate(time.Second), Instance: store.RandomSuffix()}
	}
	g.self.Beat++
	if err := s.WriteServer(&g.self); err != nil {
		// A pool that is full or read-only is served all the same.
		g.Log.V(4).Info("failed to write who serves the pool", "err", err.Error())
	}
	return nil
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
