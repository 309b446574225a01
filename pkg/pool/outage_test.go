package pool_test

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// stalled are the mounts of a node whose server answers nothing while it is down. A check goes on when it is back.
type stalled struct {
	pool.Mounts
	down *atomic.Bool
}

func (m stalled) Locate(d *dir.Dir) (bind.Place, error) {
	for m.down.Load() {
		time.Sleep(100 * time.Millisecond)
	}
	return m.Mounts.Locate(d)
}

// withOutage runs a test on two nodes that have one pool from a server. After an outage the second reaches the server a second before the
// first does.
func withOutage(t *testing.T, test func(t *testing.T, one, two *harness, outage func(time.Duration))) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var down, downForTwo atomic.Bool
		one := newHarness(t, t.TempDir())
		one.table = stalled{one.Mounts, &down}
		one.start(local)
		one.later(5 * time.Second)
		two := &harness{t: t, Node: one.Beside()}
		two.table = stalled{two.Mounts, &downForTwo}
		two.OwnDev("dev-node-2")
		two.startNode("node-2", local)
		test(t, one, two, func(d time.Duration) {
			one.later(time.Second) // since node-2 has looked
			down.Store(true)
			downForTwo.Store(true)
			one.later(d)
			downForTwo.Store(false)
			time.AfterFunc(2*time.Second, func() { down.Store(false) })
			one.later(time.Second)
		})
	})
}

func TestOutageDoesNotTakePoolFromItsDriver(t *testing.T) {
	withOutage(t, func(t *testing.T, one, two *harness, outage func(time.Duration)) {
		one.create("pvc-1", mib)
		must.Succeed(t, one.publish("pvc-1", "on-one"))
		for range 5 {
			two.later(10 * time.Second)
			outage(40 * time.Second)
			two.later(10 * time.Second)
			two.wantServedBy("node-1")
			wantError(t, two.Delete(t.Context(), id(t, "pvc-1")), volume.ErrUnavailable)
		}
		must.Succeed(t, one.Status()[0].Err)
	})
}

// onReadOnly runs a test on two nodes of a shared pool, whose filesystem can be made read-only.
func onReadOnly(t *testing.T, test func(t *testing.T, one, two *harness, remount func(flags uintptr))) {
	t.Helper()
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 64<<20)
	synctest.Test(t, func(t *testing.T) {
		one := newHarness(t, root)
		one.start(sharedPool)
		one.later(5 * time.Second)
		two := one.another("node-2")
		must.Succeed(t, syscall.Mount("pods", one.Path("pods"), "tmpfs", 0, ""))
		t.Cleanup(func() { must.Succeed(t, syscall.Unmount(one.Path("pods"), syscall.MNT_DETACH)) })
		test(t, one, two, func(flags uintptr) {
			must.Succeed(t, syscall.Mount("", root, "", syscall.MS_REMOUNT|flags, ""))
		})
	})
}

// Once it can be written, what two nodes have published would be written by both.
func TestReadOnlySharedPoolPublishesOnlyForSeveralNodesOrWithMark(t *testing.T) {
	onReadOnly(t, func(t *testing.T, one, two *harness, remount func(uintptr)) {
		for _, name := range []string{"pvc-1", "pvc-2", "pvc-several"} {
			one.create(name, mib)
		}
		must.Succeed(t, one.publish("pvc-1", "before"))
		remount(syscall.MS_RDONLY)
		two.later(30 * time.Second)
		must.Succeed(t, one.Status()[0].Err, two.Status()[0].Err)
		must.Succeed(t, one.publish("pvc-1", "after"), one.publish("pvc-1", "before"))
		wantError(t, one.publish("pvc-2", "a"), volume.ErrUnavailable)
		wantGone(t, one.Path("pods", "a"))
		wantError(t, two.publish("pvc-2", "b"), volume.ErrUnavailable)
		for target, h := range map[string]*harness{"c": one, "d": two} {
			must.Succeed(t, h.Publications().Publish(t.Context(), pool.Publication{ID: id(t, "pvc-several"), Target: h.Target(target), MultiNode: true}))
		}
		must.Succeed(t, one.unpublish("pvc-1", "before"), one.unpublish("pvc-1", "after"), one.unpublish("pvc-several", "c"))
		wantError(t, one.publish("pvc-2", "a"), volume.ErrUnavailable)

		remount(0)
		two.later(time.Minute)
		must.Succeed(t, two.publish("pvc-1", "b"))
		must.Succeed(t, one.publish("pvc-2", "a"))
		wantRefusedFor(t, two.publish("pvc-2", "b"), "node-1")
		wantError(t, one.Delete(t.Context(), id(t, "pvc-several")), volume.ErrInUse)
	})
}

// The sign that a driver has left cannot be removed any more, and says nothing where the node has no lock that is certain.
func TestReadOnlyPoolIsServedAgainByItsNode(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 64<<20)
	dev := filepath.Join(root, "dev") // what is locked there is open for writing
	must.Succeed(t, os.Mkdir(dev, 0o755), syscall.Mount("dev", dev, "tmpfs", 0, ""))
	defer func() { must.Succeed(t, syscall.Unmount(dev, syscall.MNT_DETACH)) }()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		options := h.options("node-1")
		options.OwnDev = true
		start := func() {
			h.Set = h.Start(h.Configs(local), options)
			must.Succeed(t, h.Wait(t.Context()))
			h.settled()
		}
		start()
		h.create("pvc-1", mib)
		h.later(20 * time.Second)
		must.Succeed(t, syscall.Mount("pods", h.Path("pods"), "tmpfs", 0, ""))
		defer func() { must.Succeed(t, syscall.Unmount(h.Path("pods"), syscall.MNT_DETACH)) }()
		must.Succeed(t, syscall.Mount("", root, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
		h.later(time.Minute)
		must.Succeed(t, h.Close(t.Context()))
		start()
		must.Succeed(t, h.Status()[0].Err, h.publish("pvc-1", "a"))
		must.Succeed(t, syscall.Mount("", root, "", syscall.MS_REMOUNT, ""))
		h.later(time.Minute)
		must.Succeed(t, h.Status()[0].Err)
		h.create("pvc-2", mib)
		must.Succeed(t, h.unpublish("pvc-1", "a"))
	})
}
