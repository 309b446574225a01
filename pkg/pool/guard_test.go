package pool_test

import (
	"context"
	"errors"
	"fmt"
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

// Nodes that share a pool leave marks and locks for each other, which others would neither leave nor see.
func TestPoolStaysSharedOrNot(t *testing.T) {
	for before, after := range map[string]string{local: sharedPool, sharedPool: local} {
		onPools(t, before, func(t *testing.T, one *harness) {
			one.create("pvc-1", mib)
			must.Succeed(t, one.publish("pvc-1", "a"))
			two := one.second("node-2", after)
			for range 3 {
				two.wantReshared()
				wantError(t, two.publish("pvc-1", "on-two"), volume.ErrUnavailable)
				wantError(t, two.Delete(t.Context(), id(t, "pvc-1")), volume.ErrUnavailable)
				two.later(time.Minute)
				must.Succeed(t, one.Status()[0].Err)
			}
			if seen := two.inspectAs("node-2", after)[0]; seen.Reason != string(health.PoolNotServing) || !strings.Contains(seen.Condition, "shared") {
				t.Errorf("inspect reports %+v", seen.Condition)
			}
			must.Succeed(t, one.unpublish("pvc-1", "a"), one.Close(t.Context()))
			two.later(time.Minute)
			two.wantReshared()

			two.reshare(after == sharedPool)
			two.later(time.Minute)
			must.Succeed(t, two.publish("pvc-1", "on-two"), two.unpublish("pvc-1", "on-two"))
			one.start(before)
			one.wantReshared()
			two.delete("pvc-1")
		})
	}
}

// What an earlier driver made says nothing of it, until it can be written.
func TestPoolOfEarlierDriverBecomesSharedOrNot(t *testing.T) {
	inBubble(t, func(t *testing.T, one *harness) {
		one.create("pvc-1", mib)
		must.Succeed(t, one.Close(t.Context()))
		format := must.Value(os.ReadFile(one.Own("format")))(t)
		earlier := strings.Replace(string(format), `,"shared":false`, "", 1)
		must.Succeed(t, os.WriteFile(one.Own("format"), []byte(earlier), 0o600))
		one.start(sharedPool)
		must.Succeed(t, one.Status()[0].Err)
		if got, want := string(must.Value(os.ReadFile(one.Own("format")))(t)), strings.Replace(string(format), "false", "true", 1); got != want {
			t.Errorf("the format is %s, want %s", got, want)
		}
		two := one.second("node-2", local)
		two.wantReshared()

		// Both found nothing in one moment, and wrote.
		must.Succeed(t, os.WriteFile(one.Own("format"), format, 0o600))
		one.later(time.Minute)
		one.wantReshared()
	})
}

// reshare is what an administrator does to have a pool shared, or not any more.
func (h *harness) reshare(shared bool) {
	h.t.Helper()
	format := string(must.Value(os.ReadFile(h.Own("format")))(h.t))
	format = strings.Replace(format, fmt.Sprintf(`"shared":%t`, !shared), fmt.Sprintf(`"shared":%t`, shared), 1)
	must.Succeed(h.t, os.WriteFile(h.Own("format"), []byte(format), 0o600))
}

// wantReshared expects the pool not to be served because its configuration says otherwise than its format whether it is shared.
func (h *harness) wantReshared() {
	h.t.Helper()
	if err := h.Status()[0].Err; err == nil || !strings.Contains(err.Error(), "correct the configuration") {
		h.t.Errorf("the pool does not serve because of %v", err)
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
