package pool_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// inShared runs a test on two nodes of a shared pool, each with devices of its own.
func inShared(t *testing.T, test func(t *testing.T, one, two *harness)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		one := newHarness(t, t.TempDir())
		one.start(sharedPool)
		test(t, one, one.another("node-2"))
	})
}

// wantRefusedFor expects a publication to be refused because of a node.
func wantRefusedFor(t *testing.T, err error, node string) {
	t.Helper()
	wantError(t, err, volume.ErrInUse)
	if err != nil && !strings.Contains(err.Error(), "on node "+node) {
		t.Errorf("%v, want it to name %s", err, node)
	}
}

func TestSingleNodeModes_otherNodeHasVolume(t *testing.T) {
	for name, as := range map[string]func(*pool.Publication){
		"directory":              func(*pool.Publication) {},
		"directory, read-only":   func(r *pool.Publication) { r.ReadOnly = true },
		"directory, one target":  func(r *pool.Publication) { r.SingleTarget = true },
		"block device":           func(r *pool.Publication) { r.Mode = volume.ModeBlock },
		"block device, read":     func(r *pool.Publication) { r.Mode, r.ReadOnly = volume.ModeBlock, true },
		"block device, one path": func(r *pool.Publication) { r.Mode, r.SingleTarget = volume.ModeBlock, true },
	} {
		t.Run(name, func(t *testing.T) {
			inShared(t, func(t *testing.T, one, two *harness) {
				r := pool.Publication{ID: id(t, "pvc-1"), Target: one.Target("on-one")}
				as(&r)
				if r.Mode == volume.ModeBlock {
					one.createBlock("pvc-1", mib)
				} else {
					one.create("pvc-1", mib)
				}
				must.Succeed(t, one.Publications().Publish(t.Context(), r))
				must.Succeed(t, one.Publications().Publish(t.Context(), r)) // again at the same target
				there := r
				there.Target = two.Target("on-two")
				wantRefusedFor(t, two.Publications().Publish(t.Context(), there), "node-1")
				wantGone(t, two.Path("pods", "on-two"))
				wantGone(t, two.Own("published", "node-2", "pvc-1"))

				several := there
				several.MultiNode, several.SingleTarget = true, false
				must.Succeed(t, two.Publications().Publish(t.Context(), several))
				must.Succeed(t, one.Publications().Publish(t.Context(), r)) // its pods run on
				must.Succeed(t, two.unpublish("pvc-1", "on-two"))

				must.Succeed(t, one.unpublish("pvc-1", "on-one"))
				must.Succeed(t, two.Publications().Publish(t.Context(), there))
				wantRefusedFor(t, one.Publications().Publish(t.Context(), r), "node-2")
			})
		})
	}
}

func TestSingleNodeVolume_twoNodesAtOnce(t *testing.T) {
	inShared(t, func(t *testing.T, one, two *harness) {
		one.create("pvc-1", mib)
		unlock := one.lockVolume("pvc-1")
		first := background(func() error { return one.publish("pvc-1", "on-one") })
		second := background(func() error { return two.publish("pvc-1", "on-two") })
		unlock()
		var refused int
		for _, err := range []error{<-first, <-second} {
			if err != nil {
				wantError(t, err, volume.ErrInUse)
				refused++
			}
		}
		if refused != 1 {
			t.Errorf("%d of two were refused, want one", refused)
		}
	})
}

// A driver that is replaced leaves its volumes mounted, and says nothing for a while.
func TestSingleNodeVolume_driverRestarts(t *testing.T) {
	inShared(t, func(t *testing.T, one, two *harness) {
		one.create("pvc-1", mib)
		must.Succeed(t, one.publish("pvc-1", "on-one"))
		one.restart(sharedPool)
		two.later(time.Hour)
		wantRefusedFor(t, two.publish("pvc-1", "on-two"), "node-1")

		// A reboot takes the mounts.
		must.Succeed(t, one.Close(context.Background()))
		must.Succeed(t, one.Mounts.Unpublish(one.Target("on-one"), nil))
		one.start(sharedPool)
		must.Succeed(t, two.publish("pvc-1", "on-two"))
	})
}

// Its pods run on: an image cannot be pulled, say. Only the administrator knows that a node is off, and what to remove then.
func TestVolumesStayPublishedWithoutDriver(t *testing.T) {
	inShared(t, func(t *testing.T, one, two *harness) {
		one.createBlock("pvc-1", mib)
		must.Succeed(t, one.publishBlock("pvc-1", "on-one"))
		must.Succeed(t, one.Close(context.Background()), two.Close(context.Background()))
		two.every = 20 * time.Second
		two.startNode("node-2", sharedPool)
		must.Succeed(t, os.RemoveAll(one.Own("trash", "node-1"))) // its sign of life
		remove := "rm -r '" + two.Own("published", "node-1") + "'"
		for _, after := range []time.Duration{time.Minute, 6 * time.Minute, 25 * time.Hour} {
			two.later(after)
			refused := two.publishBlock("pvc-1", "on-two")
			wantRefusedFor(t, refused, "node-1")
			notDeleted := two.Delete(t.Context(), id(t, "pvc-1"))
			wantRefusedFor(t, notDeleted, "node-1")
			for _, err := range []error{refused, notDeleted} {
				if err != nil && !strings.Contains(err.Error(), remove) {
					t.Errorf("%v, want it to say %s", err, remove)
				}
			}
		}
		must.Succeed(t, os.RemoveAll(two.Own("published", "node-1")))
		must.Succeed(t, two.publishBlock("pvc-1", "on-two"))
		// It was on after all. Its pods run on, and it gets no more of them.
		one.start(sharedPool)
		must.Succeed(t, one.publishBlock("pvc-1", "on-one"))
		wantRefusedFor(t, one.publishBlock("pvc-1", "also-on-one"), "node-2")
		wantRefusedFor(t, two.publishBlock("pvc-1", "also-on-two"), "node-1")
	})
}

// The upstream driver leaves none.
func TestMarksAreRestoredFromMounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := newHarness(t, t.TempDir())
		one.start(sharedPool)
		one.create("pvc-1", mib)
		one.createBlock("pvc-disk", mib)
		must.Succeed(t, one.publish("pvc-1", "a"))
		must.Succeed(t, one.publishBlock("pvc-disk", "b"), one.Close(t.Context()))
		must.Succeed(t, os.RemoveAll(one.Own("published")))
		one.start(sharedPool)
		two := one.another("node-2")
		wantRefusedFor(t, two.publish("pvc-1", "on-two"), "node-1")
		wantRefusedFor(t, two.publishBlock("pvc-disk", "on-two"), "node-1")
		// An administrator took this node to be off.
		must.Succeed(t, os.RemoveAll(one.Own("published", "node-1")))
		one.later(2 * time.Minute)
		wantRefusedFor(t, two.publish("pvc-1", "on-two"), "node-1")
		must.Succeed(t, one.unpublish("pvc-1", "a"))
		must.Succeed(t, two.publish("pvc-1", "on-two"))
	})
}

// What a crash leaves between mark and mount, or between unmount and mark, is no publication.
func TestMarkWithoutMountIsRemovedAtStart(t *testing.T) {
	inShared(t, func(t *testing.T, one, two *harness) {
		one.create("pvc-1", mib)
		must.Succeed(t, one.publish("pvc-1", "a"))
		must.Succeed(t, one.unpublish("pvc-1", "a"))
		must.Succeed(t, os.WriteFile(one.Own("published", "node-1", "pvc-1"), nil, 0o600))
		wantRefusedFor(t, two.publish("pvc-1", "on-two"), "node-1")
		one.restart(sharedPool)
		must.Succeed(t, two.publish("pvc-1", "on-two"))
	})
}

// A mark that cannot be written is one that others do not see.
func TestPublishWithoutMarkFails(t *testing.T) {
	inShared(t, func(t *testing.T, one, _ *harness) {
		one.create("pvc-1", mib)
		must.Succeed(t, os.WriteFile(one.Own("published"), nil, 0o600)) // no directory can be made there
		if err := one.publish("pvc-1", "a"); err == nil {
			t.Error("a volume was published of which other nodes cannot know")
		}
		wantGone(t, one.Path("pods", "a"))
	})
}
