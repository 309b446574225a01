package pool_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label/labeltest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// second is another driver on the same disk. On another node, it is as if both saw one
// directory of NFS.
func (h *harness) second(node, datadir string) *harness {
	h.t.Helper()
	n := &harness{t: h.t, Node: h.Beside()}
	if node != "node-1" {
		n.OwnDev("dev-" + node)
	}
	n.startNode(node, datadir)
	return n
}

func TestSecondDriverWaitsForPool(t *testing.T) {
	for name, node := range map[string]string{"same node": "node-1", "another node": "node-2"} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, one *harness) {
				one.create("pvc-1", mib)
				two := one.second(node, local)
				for range 10 { // for longer than a driver counts as alive without a sign
					one.later(10 * time.Second)
					two.wantServedBy("node-1")
					must.Succeed(t, one.Status()[0].Err)
				}
				inside := must.Value(bind.ParseTarget(two.Path("pool", "pvc-1", "target")))(t)
				wantError(t, two.Publications().Publish(t.Context(), pool.Publication{ID: id(t, "pvc-1"), Target: inside}), volume.ErrInvalid)
				if seen := one.inspect(local)[0]; seen.Abnormal || seen.Server == nil || seen.Server.Node != "node-1" {
					t.Errorf("inspect reports %+v, served by %v; want it in order and served by node-1", seen.Condition, seen.Server)
				}
				if _, err := two.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}}); !errors.Is(err, volume.ErrNoSpace) {
					t.Errorf("create: %v, want ErrNoSpace", err)
				}
				wantError(t, two.Delete(t.Context(), id(t, "pvc-1")), volume.ErrUnavailable)
				one.wantVolumes("pvc-1")
				if seen := two.inspectAs(node, local)[0]; (seen.Reason == string(health.PoolNotServing)) != (node == "node-2") || seen.Server == nil || seen.Server.Node != "node-1" {
					t.Errorf("inspect reports %+v, served by %v; want that node-1 serves the pool", seen.Condition, seen.Server)
				}

				must.Succeed(t, one.Close(context.Background()))
				two.later(2 * time.Second)
				two.create("pvc-2", mib)
				two.wantVolumes("pvc-1", "pvc-2")
				if seen := two.inspectAs(node, local)[0]; seen.Abnormal || seen.Server == nil || seen.Server.Node != node {
					t.Errorf("inspect reports %+v, served by %v; want it in order and served by %s", seen.Condition, seen.Server, node)
				}
			})
		})
	}
}

// An administrator may take the file for one that a dead driver left.
func TestRemovedLockIsMadeAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, one *harness) {
		must.Succeed(t, os.Remove(one.Own("lock")))
		one.later(10 * time.Second)
		two := one.second("node-2", local)
		for range 10 {
			two.later(10 * time.Second)
			two.wantServedBy("node-1")
			must.Succeed(t, one.Status()[0].Err)
		}
	})
}

// slowLabels are given when something is received.
type slowLabels struct {
	*labeltest.Fake
	until chan struct{}
}

func (l *slowLabels) Ensure(root *dir.Dir, scope label.Scope) (bool, error) {
	<-l.until
	return l.Fake.Ensure(root, scope)
}

// A call that is slower than the driver is to end goes on until the process ends.
func TestPoolIsNotHandedOverDuringCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := newHarness(t, t.TempDir())
		options := one.options("node-1")
		slow := &slowLabels{Fake: one.Labels, until: make(chan struct{})}
		options.Labels = slow
		one.Set = one.Start(one.Configs(local), options)
		must.Succeed(t, one.Wait(t.Context()))
		made := make(chan error)
		go func() {
			made <- must.Err(one.Create(t.Context(), pool.Request{ID: id(t, "pvc-1"), Range: volume.Range{Required: mib}}))
		}()
		synctest.Wait()
		must.Succeed(t, one.Close(t.Context()))
		two := one.second("node-1", local)
		two.wantServedBy("node-1")
		wantError(t, one.Delete(t.Context(), id(t, "pvc-2")), volume.ErrUnavailable) // no other call begins
		close(slow.until)
		must.Succeed(t, <-made)
		two.later(2 * time.Second)
		two.wantVolumes("pvc-1")
		two.wantClean()
	})
}

// While the configuration of a pool is changed, node by node.
func TestSharedPoolWaitsForDriverThatDoesNotShareIt(t *testing.T) {
	inBubble(t, func(t *testing.T, one *harness) {
		one.create("pvc-1", mib)
		must.Succeed(t, one.publish("pvc-1", "a"))
		two := &harness{t: t, Node: one.Beside()}
		two.startNode("node-2", sharedPool)
		for range 10 {
			two.wantServedBy("node-1")
			wantError(t, two.Delete(t.Context(), id(t, "pvc-1")), volume.ErrUnavailable)
			two.later(10 * time.Second)
		}
		sign := must.Value(os.ReadFile(one.Own("lock")))(t)
		must.Succeed(t, one.unpublish("pvc-1", "a"), one.Close(t.Context()))
		two.later(2 * time.Second)
		two.delete("pvc-1")
		must.Succeed(t, two.Close(t.Context()))

		must.Succeed(t, os.WriteFile(one.Own("lock"), sign, 0o600)) // it was killed
		two.start(sharedPool)
		two.wantServedBy("node-1")
		two.later(time.Minute)
		two.create("pvc-2", mib)
		two.restart(sharedPool)
		two.wantVolumes("pvc-2")
	})
}

// Nothing shows that the pool is shared before a volume of it is published.
func TestSharedPoolIsLeftToDriverThatDoesNotShareIt(t *testing.T) {
	onPools(t, sharedPool, func(t *testing.T, one *harness) {
		one.create("pvc-1", mib)
		two := &harness{t: t, Node: one.Beside()}
		two.startNode("node-2", local)
		must.Succeed(t, two.publish("pvc-1", "a"))
		one.later(20 * time.Second)
		one.wantServedBy("node-2")
		wantError(t, one.Delete(t.Context(), id(t, "pvc-1")), volume.ErrUnavailable)
	})
}

func TestDriverThatDoesNotSharePoolWaitsForThoseThatDo(t *testing.T) {
	onPools(t, sharedPool, func(t *testing.T, one *harness) {
		one.create("pvc-1", mib)
		must.Succeed(t, one.publish("pvc-1", "a"))
		two := &harness{t: t, Node: one.Beside()}
		two.startNode("node-2", local)
		for range 10 {
			if err := two.Status()[0].Err; err == nil || !strings.Contains(err.Error(), "node-1") {
				t.Errorf("the pool does not serve because of %v, want the node node-1", err)
			}
			wantError(t, two.Delete(t.Context(), id(t, "pvc-1")), volume.ErrUnavailable)
			two.later(10 * time.Second)
			must.Succeed(t, one.Status()[0].Err)
		}
		must.Succeed(t, one.unpublish("pvc-1", "a"), one.Close(t.Context()))
		two.later(time.Minute)
		two.delete("pvc-1")
	})
}

// Pods run on without the driver of their node.
func TestDriverThatDoesNotSharePoolLeavesWhatIsPublishedElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := newHarness(t, t.TempDir())
		one.start(sharedPool)
		one.create("pvc-1", mib)
		one.create("pvc-2", mib)
		one.createBlock("pvc-disk", mib)
		must.Succeed(t, one.publish("pvc-1", "a"), one.publish("pvc-2", "b"), one.publishBlock("pvc-disk", "disk"))
		must.Succeed(t, one.Close(context.Background()))
		two := &harness{t: t, Node: one.Beside()}
		two.OwnDev("dev-node-2")
		two.begin("node-2", local)
		for range 5 {
			two.later(time.Minute)
			two.wantOutOf("node-1")
			wantError(t, two.publish("pvc-1", "on-two"), volume.ErrUnavailable)
			wantError(t, two.publishBlock("pvc-disk", "disk-on-two"), volume.ErrUnavailable)
			wantError(t, two.Delete(t.Context(), id(t, "pvc-2")), volume.ErrUnavailable)
		}
		if seen := two.inspectAs("node-2", local)[0]; seen.Reason != string(health.PoolNotServing) || !strings.Contains(seen.Condition, "published on node node-1") {
			t.Errorf("inspect reports %+v, want that node-1 has volumes published", seen.Condition)
		}
		must.Succeed(t, os.RemoveAll(one.Own("published", "node-1"))) // it is off
		two.later(time.Minute)
		must.Succeed(t, two.publish("pvc-1", "on-two"))
		two.delete("pvc-2")
	})
}

// Each node has a pod with a volume of its own.
func TestSharedTakenFromPoolNodeByNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := newHarness(t, t.TempDir())
		one.start(sharedPool)
		two := one.another("node-2")
		one.create("pvc-1", mib)
		one.create("pvc-2", mib)
		must.Succeed(t, one.publish("pvc-1", "a"), two.publish("pvc-2", "b"))
		must.Succeed(t, two.Close(context.Background()))
		two.begin("node-2", local)
		two.later(5 * time.Minute)
		must.Succeed(t, one.Close(context.Background()))
		one.begin("node-1", local)
		one.later(5 * time.Minute)
		one.wantOutOf("node-2")
		two.wantOutOf("node-1")
		must.Succeed(t, two.unpublish("pvc-2", "b"))

		must.Succeed(t, os.RemoveAll(one.Own("published", "node-2")))
		one.later(time.Minute)
		must.Succeed(t, one.publish("pvc-2", "b"), one.unpublish("pvc-1", "a"), one.unpublish("pvc-2", "b"))
		one.later(2 * time.Minute)
		must.Succeed(t, one.Close(context.Background())) // without a mark that would keep the other out
		two.later(time.Minute)
		two.delete("pvc-1")
	})
}

// wantOutOf expects the pool not to be served here, because of marks of a node, and the reason to say how to give that up.
func (h *harness) wantOutOf(node string) {
	h.t.Helper()
	err := h.Status()[0].Err
	if !errors.Is(err, store.ErrServed) || !strings.Contains(err.Error(), "published on node "+node) || !strings.Contains(err.Error(), "rm -r '"+h.Own("published", node)) {
		h.t.Errorf("the pool does not serve because of %v, want what node %s has published", err, node)
	}
}

// wantServedBy expects the pool not to be served here, and the reason to name who serves it.
func (h *harness) wantServedBy(node string) {
	h.t.Helper()
	host := must.Value(os.Hostname())(h.t)
	status := h.Status()[0]
	if status.Err == nil || !strings.Contains(status.Err.Error(), node) || !strings.Contains(status.Err.Error(), host) {
		h.t.Errorf("the pool does not serve because of %v, want the node %s and the host %s", status.Err, node, host)
	}
}

// A driver from before the lock, or inspect, does not keep a driver from serving.
func TestPoolIsServedBesideInspect(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		for range 3 {
			if seen := h.inspect(local)[0]; seen.Abnormal || seen.Server == nil {
				t.Fatalf("inspect reports %+v, served by %v", seen.Condition, seen.Server)
			}
			h.restart(local)
			must.Succeed(t, h.Status()[0].Err)
		}
		must.Succeed(t, h.Close(context.Background()))
		if seen := h.inspect(local)[0]; seen.Abnormal || seen.Server != nil {
			t.Errorf("inspect reports %+v, served by %v; want no driver", seen.Condition, seen.Server)
		}
	})
}
