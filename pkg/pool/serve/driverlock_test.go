package serve_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const uuid = "kwinljr55icti4ji"

// A driver that was killed has its lock for as long as a thread of it waits for a disk that hangs. If it was only slow, it finds out.
func TestDriverThatKeepsItsLockIsOutlived(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, dev := aPool(t), aDev(t)
		one, two := aGuard(t, "node-1", dev), aGuard(t, "node-1", dev)
		must.Succeed(t, one.Acquire(s, uuid))
		must.ErrorIs(t, two.Acquire(s, uuid), store.ErrServed)
		time.Sleep(time.Hour) // in which it could not look either
		for range 12 {
			must.ErrorIs(t, two.Acquire(s, uuid), store.ErrServed)
			time.Sleep(10 * time.Second)
		}
		for range 4 {
			must.Succeed(t, two.Acquire(s, uuid))
			must.ErrorIs(t, one.Acquire(s, uuid), store.ErrServed)
			time.Sleep(10 * time.Second)
		}
	})
}

// On a pool that is full or read-only no driver can write its sign: that of the one that serves does not change, and says nothing.
func TestDriverWithoutSignIsNotOutlived(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "chattr")
	for title, node := range map[string]string{"same node": "node-1", "another node": "node-2"} {
		t.Run(title, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, dev := aPool(t), aDev(t)
				one, two := aGuard(t, "node-1", dev), aGuard(t, node, dev)
				if node != "node-1" {
					two.Dev = aDev(t)
				}
				must.Succeed(t, one.Acquire(s, uuid))
				sign := filepath.Join(s.Root().String(), ".hostpath-provisioner", "lock")
				must.Succeed(t, exec.CommandContext(t.Context(), "chattr", "+i", sign).Run())
				t.Cleanup(func() { _ = exec.Command("chattr", "-i", sign).Run() }) // it was taken off if all went well
				for range 20 {
					time.Sleep(10 * time.Second)
					must.Succeed(t, one.Acquire(s, uuid))
					must.ErrorIs(t, two.Acquire(s, uuid), store.ErrServed)
				}
				must.Succeed(t, exec.CommandContext(t.Context(), "chattr", "-i", sign).Run())
				must.ErrorIs(t, two.Acquire(s, uuid), store.ErrServed)
				must.Succeed(t, one.Acquire(s, uuid))
				must.ErrorIs(t, two.Acquire(s, uuid), store.ErrServed)
			})
		})
	}
}

func TestOneDriverServes(t *testing.T) {
	for title, c := range map[string]struct {
		otherNode bool
		leave     func(*testing.T, *serve.Guard, *store.Store)
		after     time.Duration
	}{
		"same node, released":       {false, func(_ *testing.T, g *serve.Guard, _ *store.Store) { g.Release() }, 0},
		"another node, withdrawn":   {true, func(_ *testing.T, g *serve.Guard, s *store.Store) { g.Withdraw(s) }, 0},
		"another node, not renewed": {true, func(*testing.T, *serve.Guard, *store.Store) {}, 30 * time.Second},
		"same node, lost its power": {false, loseSign, 0},
	} {
		t.Run(title, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, dev := aPool(t), aDev(t)
				one := aGuard(t, "node-1", dev)
				must.Succeed(t, one.Acquire(s, uuid))
				two := aGuard(t, "node-1", dev)
				if c.otherNode {
					two = aGuard(t, "node-2", aDev(t))
				}
				for range 4 { // for longer than a sign counts
					time.Sleep(10 * time.Second)
					must.Succeed(t, one.Acquire(s, uuid))
					must.ErrorIs(t, two.Acquire(s, uuid), store.ErrServed)
				}
				c.leave(t, one, s)
				if c.after > 0 {
					for range c.after / (10 * time.Second) {
						must.ErrorIs(t, two.Acquire(s, uuid), store.ErrServed)
						time.Sleep(10 * time.Second)
					}
				}
				must.Succeed(t, two.Acquire(s, uuid))
			})
		})
	}
}

// loseSign leaves what a filesystem has of a sign whose blocks it had not written when the power went.
func loseSign(t *testing.T, g *serve.Guard, s *store.Store) {
	g.Release()
	path := filepath.Join(s.Root().String(), ".hostpath-provisioner", "lock")
	sign := must.Value(os.ReadFile(path))(t)
	must.Succeed(t, os.WriteFile(path, make([]byte, len(sign)), 0o600))
}

// Where drivers of one node do not see each other's locks, their signs of life count.
func TestOneDriverOfNodeServesWithoutItsDev(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := aPool(t)
		one, two := aGuard(t, "node-1", aDev(t)), aGuard(t, "node-1", aDev(t))
		one.OwnDev, two.OwnDev = true, true
		must.Succeed(t, one.Acquire(s, uuid))
		for range 4 {
			time.Sleep(10 * time.Second)
			must.Succeed(t, one.Acquire(s, uuid))
			must.ErrorIs(t, two.Acquire(s, uuid), store.ErrServed)
		}
		one.Withdraw(s)
		must.Succeed(t, two.Acquire(s, uuid))
		three := aGuard(t, "node-1", aDev(t)) // after two was killed
		three.OwnDev = true
		for range 3 {
			must.ErrorIs(t, three.Acquire(s, uuid), store.ErrServed)
			time.Sleep(10 * time.Second)
		}
		must.Succeed(t, three.Acquire(s, uuid))
	})
}

// Any process of a node can lock its /dev/null.
func TestLockOfAnyProcessStopsNoDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, dev := aPool(t), aDev(t)
		unlock := must.Value(dir.TryLockExisting(dev, "null", store.ServerByte(uuid)))(t)
		defer unlock()
		one, two := aGuard(t, "node-1", dev), aGuard(t, "node-1", dev)
		must.Succeed(t, one.Acquire(s, uuid))
		must.ErrorIs(t, two.Acquire(s, uuid), store.ErrServed)
		one.Release()
		one.Withdraw(s)
		must.Succeed(t, two.Acquire(s, uuid))
	})
}

// A driver from before, and one whose container may not open loop-control, lock only /dev/null.
func TestDriversWithAndWithoutLoopControl(t *testing.T) {
	for title, firstHasIt := range map[string]bool{"the first has it": true, "the second has it": false} {
		t.Run(title, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, with := aPool(t), aDev(t)
				path := t.TempDir()
				must.Succeed(t, os.Link(filepath.Join(with.String(), "null"), filepath.Join(path, "null")))
				without := must.Value(dir.Open(path))(t)
				defer func() { must.Succeed(t, without.Close()) }()
				one, two := aGuard(t, "node-1", with), aGuard(t, "node-1", without)
				if !firstHasIt {
					one, two = two, one
				}
				must.Succeed(t, one.Acquire(s, uuid))
				for range 4 { // for longer than a sign counts
					time.Sleep(10 * time.Second)
					must.Succeed(t, one.Acquire(s, uuid))
					must.ErrorIs(t, two.Acquire(s, uuid), store.ErrServed)
				}
				one.Withdraw(s)
				one.Release()
				must.Succeed(t, two.Acquire(s, uuid))
			})
		})
	}
}

func aGuard(t *testing.T, node string, dev *dir.Dir) *serve.Guard {
	t.Helper()
	g := &serve.Guard{Dev: dev, Node: nodeID(t, node), Log: logr.Discard()}
	t.Cleanup(g.Release)
	return g
}

func nodeID(t *testing.T, name string) volume.NodeID {
	t.Helper()
	id := must.Value(volume.ParseNodeID(name))(t)
	return id
}

// aDev is the /dev of a node.
func aDev(t *testing.T) *dir.Dir {
	t.Helper()
	path := t.TempDir()
	for _, name := range []string{"loop-control", "null"} {
		must.Succeed(t, os.WriteFile(filepath.Join(path, name), nil, 0o600))
	}
	dev := must.Value(dir.Open(path))(t)
	t.Cleanup(func() { must.Succeed(t, dev.Close()) })
	return dev
}

func aPool(t *testing.T) *store.Store {
	t.Helper()
	ignore := func(*dir.Dir) error { return nil }
	s, _, err := store.Create(t.Context(), &store.Location{Path: t.TempDir(), Node: nodeID(t, "node-1"), Verify: ignore, Nested: ignore})
	must.Succeed(t, err)
	t.Cleanup(s.Close)
	return s
}
