package pool_test

import (
	"fmt"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestRemovedLayoutDirectoriesAreRestored(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		for _, part := range []string{"creating", "trash"} {
			must.Succeed(t, os.RemoveAll(h.Own(part)))
		}
		h.create("pvc-1", mib)
		h.delete("pvc-1")
		h.wantClean()
	})
}

func TestStuckDeepTrashIsRetried(t *testing.T) {
	testenv.NeedRoot(t)
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		deep := h.Path("pool", "pvc-1")
		for range 70 {
			deep += "/d"
		}
		must.Succeed(t, os.MkdirAll(deep, 0o755))
		must.Succeed(t, syscall.Mount("tmpfs", deep, "tmpfs", 0, ""))
		h.delete("pvc-1")
		h.settled()
		h.later(2 * time.Hour)
		if status := h.Status()[0]; status.Trash.Pieces != 1 || status.Trash.Stuck != 1 {
			t.Errorf("status %+v, want one piece of stuck trash", status)
		}
		unmountBelow(t, h.Own("trash", "node-1"))
		h.later(2 * time.Hour)
		h.wantClean()
	})
}

func unmountBelow(t *testing.T, path string) {
	t.Helper()
	for syscall.Unmount(path, 0) != nil {
		below := names(t, path)
		if len(below) != 1 {
			t.Fatalf("%s has %q, want the way to the mount", path, below)
		}
		path += "/" + below[0]
	}
}

// locked does something as a call does it, and again if another has the lock.
func (h *harness) locked(name string, do func()) {
	for {
		if unlock, err := h.Lock(id(h.t, name)); err == nil {
			do()
			unlock()
			return
		}
	}
}

func TestCopyOfPoolBelowMountIsNotWritten(t *testing.T) {
	testenv.NeedRoot(t)
	onPools(t, local, func(t *testing.T, h *harness) {
		must.Succeed(t, h.Close(t.Context()))
		// The pool moves to a disk of its own, and the old directory stays below.
		must.Succeed(t, os.Mkdir(h.Path("disk"), 0o750))
		must.Succeed(t, syscall.Mount("tmpfs", h.Path("disk"), "tmpfs", 0, "size=64m"))
		must.Succeed(t, os.CopyFS(h.Path("disk"), os.DirFS(h.Path("pool"))))
		must.Succeed(t, syscall.Mount(h.Path("disk"), h.Path("pool"), "", syscall.MS_MOVE, ""))
		h.start(local)
		h.create("pvc-1", mib)
		must.Succeed(t, syscall.Unmount(h.Path("pool"), 0))
		_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}})
		wantError(t, err, volume.ErrNoSpace)
		wantGone(t, h.Path("pool", "pvc-2"))
	})
}

func TestUnpublishOnReadOnlySharedPool(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		must.Succeed(t, os.Mkdir(h.Path("disk"), 0o755))
		disk(t, h)
		const shared = `[{"name":"local","path":"disk","shared":true}]`
		h.start(shared)
		h.create("pvc-1", mib)
		must.Succeed(t, h.publish("pvc-1", "a"))
		must.Succeed(t, syscall.Mount("", h.Path("disk"), "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		must.Succeed(t, h.publish("pvc-1", "b"))
		must.Succeed(t, h.unpublish("pvc-1", "b"))
		_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}})
		wantError(t, err, volume.ErrNoSpace)
		h.create("pvc-1", mib) // the answer of before
	})
}

func TestUnpublishAfterRestoreFromBackup(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		must.Succeed(t, h.publish("pvc-1", "a"))
		must.Succeed(t, os.Rename(h.Path("pool", "pvc-1"), h.Path("broken")))
		must.Succeed(t, os.Mkdir(h.Path("pool", "pvc-1"), 0o777))
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		wantGone(t, h.Path("pods", "a"))
	})
}

func TestSharedPoolIsNotOversold(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		const shared = `[{"name":"local","path":"pool","shared":true}]`
		one := newHarness(t, root)
		one.start(shared)
		two := &harness{t: t, Node: one.Beside()}
		two.startNode("node-2", shared)

		var calls sync.WaitGroup
		var made sync.Map
		for i := range 16 {
			b := []*harness{one, two}[i%2]
			calls.Go(func() {
				name := fmt.Sprintf("pvc-%d", i)
				if _, err := b.Create(t.Context(), pool.Request{ID: id(t, name), Range: volume.Range{Required: 100 * mib}}); err == nil {
					made.Store(name, true)
				} else {
					wantError(t, err, volume.ErrNoSpace)
				}
			})
			calls.Go(func() { b.capacity(); b.volumes() })
		}
		calls.Wait()
		if got := length(&made); got != 2 {
			t.Errorf("%d volumes of 100 MiB were promised of 256, 2 fit", got)
		}
	})
}
