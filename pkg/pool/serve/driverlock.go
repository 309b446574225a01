package serve

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

const (
	// aliveFor is how long a driver of another node counts as alive after its sign of life has
	// changed, by the clock of this process: a sign comes with each check.
	aliveFor = 30 * time.Second
	// deadFor is how long a driver that has the lock of this node counts as alive after its sign of life has changed. One that was
	// killed keeps the lock while a thread of it waits for a disk that hangs, that of another pool, say.
	deadFor = 2 * time.Minute
	// tryToServe is for those who inspect the pool, and hold the lock for an instant.
	tryToServe = 50 * time.Millisecond
)

// A Guard keeps other drivers from serving a pool that is not shared. Against others of its node it locks a byte of a file in the
// node's /dev: a lock in the pool would keep its filesystem in use. Against those of other nodes, which have the same directory by
// NFS, it writes a sign of life. It is for one goroutine at a time.
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
	// signed says that this driver has written its sign of life into that pool: another there is newer.
	signed bool
	node   *store.NodeLock // nil without
	signs  store.Signs
}

// Acquire makes sure that no other driver serves the pool of that uuid, and shows that this one does: it is
// called with each check. It returns store.ErrServed if another one does.
func (g *Guard) Acquire(s *store.Store, uuid string) error {
	// The signs of others count where one of this driver could be written.
	g.signs.Look(s.Nodes().ProbeServer() == nil)
	alone, err := g.lockNode(s, uuid)
	if err != nil {
		return err
	}
	return g.claim(s, alone)
}

// lockNode keeps other drivers of this node from serving the pool until Release. It is not certain to be alone where
// drivers do not see each other's locks, or where any process may have taken one.
func (g *Guard) lockNode(s *store.Store, uuid string) (alone bool, err error) {
	if g.uuid != uuid {
		g.Release() // another pool is at the path now
		g.uuid = uuid
	}
	if g.Dev == nil {
		return true, nil
	}
	first := g.node == nil
	if first {
		g.node = store.NewNodeLock(g.Dev, store.ServerByte(uuid))
	}
	began := time.Now()
	alone, err = g.node.Try()
	for (err != nil || first && !alone) && time.Since(began) < tryToServe {
		time.Sleep(time.Millisecond)
		alone, err = g.node.Try()
	}
	if err != nil && g.outlived(s) {
		// By this sign the driver that has the lock finds out, if it is there after all.
		return false, g.write(s)
	}
	if err != nil {
		return false, servedBy(s)
	}
	return alone && !g.OwnDev, nil
}

// outlived says that the driver which has the lock gives no sign of life any more, or that this one has taken the pool over from it.
func (g *Guard) outlived(s *store.Store) bool {
	by, sign, err := s.Nodes().Server()
	if err != nil || sign == "" {
		return false
	}
	return g.signed && by.Instance == g.self.Instance || g.signs.Unchanged("server", sign) >= deadFor
}

// claim writes the sign of life, unless another driver does: one of another node, any where it is not certain that this one is
// alone on its node, and any that has taken the pool over from this one, which gave no sign for long.
func (g *Guard) claim(s *store.Store, alone bool) error {
	by, sign, err := s.Nodes().Server()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	other := by.Node != g.Node.String() || (!alone || g.signed) && by.Instance != g.self.Instance
	other = other && sign != ""
	if other && !g.signed && by.Node == g.Node.String() && errors.Is(s.Nodes().ProbeServer(), syscall.EROFS) {
		return nil // for reading, also beside another driver of the node: it goes by the sign once that can be written
	}
	if other && g.signs.Unchanged("server", sign) < aliveFor {
		return servedBy(s)
	}
	if err := g.write(s); err != nil {
		if other {
			return err
		}
		return nil // a pool that is full or read-only is served all the same
	}
	g.signed = true
	return nil
}

// write writes the next sign of life. Where none can be written, that of another does not change either, and says nothing.
func (g *Guard) write(s *store.Store) error {
	if g.self.Instance == "" {
		host, _ := os.Hostname()
		g.self = store.Server{Node: g.Node.String(), Host: host, Since: time.Now().UTC().Truncate(time.Second), Instance: store.RandomSuffix()}
	}
	g.self.Beat++
	if err := s.Nodes().WriteServer(&g.self); err != nil {
		g.Log.V(4).Info("Failed to write who serves the pool", "err", err.Error())
		return servedBy(s)
	}
	return nil
}

func servedBy(s *store.Store) error {
	by, _, err := s.Nodes().Server()
	if err != nil {
		return store.ErrServed
	}
	return fmt.Errorf("%w: it is served by %s", store.ErrServed, by)
}

// Release lets other drivers of this node serve the pool.
func (g *Guard) Release() {
	g.signed = false
	if g.node != nil {
		g.node.Release()
		g.node = nil
	}
}

// Withdraw removes the sign of life, so that drivers of other nodes can serve the pool at once.
func (g *Guard) Withdraw(s *store.Store) {
	if by, _, err := s.Nodes().Server(); err == nil && by.Instance == g.self.Instance {
		_ = s.Nodes().WriteServer(nil) // others wait a little longer without
	}
}
