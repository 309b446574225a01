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
	inBubble(t, func(t *testing.T, b *bench) {
		for _, part := range []string{"creating", "trash"} {
			must.Succeed(t, os.RemoveAll(b.Own(part)))
		}
		b.create("pvc-1", mib)
		b.delete("pvc-1")
		b.wantClean()
	})
}

func TestStuckDeepTrashIsRetried(t *testing.T) {
	testenv.NeedRoot(t)
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		deep := b.Path("pool", "pvc-1")
		for range 70 {
			deep += "/d"
		}
		must.Succeed(t, os.MkdirAll(deep, 0o755))
		must.Succeed(t, syscall.Mount("tmpfs", deep, "tmpfs", 0, ""))
		b.delete("pvc-1")
		b.settled()
		b.later(2 * time.Hour)
		if status := b.Status()[0]; status.Trash.Pieces != 1 || status.Trash.Stuck != 1 {
			t.Errorf("status %+v, want one piece of stuck trash", status)
		}
		unmountBelow(t, b.Own("trash", "node-1"))
		b.later(2 * time.Hour)
		b.wantClean()
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
func (b *bench) locked(name string, do func()) {
	for {
		if unlock, err := b.Lock(id(b.t, name)); err == nil {
			do()
			unlock()
			return
		}
	}
}

func TestCopyOfPoolBelowMountIsNotWritten(t *testing.T) {
	testenv.NeedRoot(t)
	onPools(t, local, func(t *testing.T, b *bench) {
		must.Succeed(t, b.Close(t.Context()))
		// The pool moves to a disk of its own, and the old directory stays below.
		must.Succeed(t, os.Mkdir(b.Path("disk"), 0o750))
		must.Succeed(t, syscall.Mount("tmpfs", b.Path("disk"), "tmpfs", 0, "size=64m"))
		must.Succeed(t, os.CopyFS(b.Path("disk"), os.DirFS(b.Path("pool"))))
		must.Succeed(t, syscall.Mount(b.Path("disk"), b.Path("pool"), "", syscall.MS_MOVE, ""))
		b.start(local)
		b.create("pvc-1", mib)
		must.Succeed(t, syscall.Unmount(b.Path("pool"), 0))
		_, err := b.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}})
		wantError(t, err, volume.ErrNoSpace)
		wantGone(t, b.Path("pool", "pvc-2"))
	})
}

func TestUnpublishOnReadOnlySharedPool(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		must.Succeed(t, os.Mkdir(b.Path("disk"), 0o755))
		disk(t, b)
		const shared = `[{"name":"local","path":"disk","shared":true}]`
		b.start(shared)
		b.create("pvc-1", mib)
		must.Succeed(t, b.publish("pvc-1", "a"))
		must.Succeed(t, syscall.Mount("", b.Path("disk"), "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
		must.Succeed(t, b.unpublish("pvc-1", "a"))
		must.Succeed(t, b.publish("pvc-1", "b"))
		must.Succeed(t, b.unpublish("pvc-1", "b"))
		_, err := b.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: mib}})
		wantError(t, err, volume.ErrNoSpace)
		b.create("pvc-1", mib) // the answer of before
	})
}

func TestUnpublishAfterRestoreFromBackup(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		must.Succeed(t, b.publish("pvc-1", "a"))
		must.Succeed(t, os.Rename(b.Path("pool", "pvc-1"), b.Path("broken")))
		must.Succeed(t, os.Mkdir(b.Path("pool", "pvc-1"), 0o777))
		must.Succeed(t, b.unpublish("pvc-1", "a"))
		wantGone(t, b.Path("pods", "a"))
	})
}

func TestSharedPoolIsNotOversold(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		const shared = `[{"name":"local","path":"pool","shared":true}]`
		one := newBench(t, root)
		one.start(shared)
		two := &bench{t: t, Node: one.Beside()}
		two.startNode("node-2", shared)

		var calls sync.WaitGroup
		var made sync.Map
		for i := range 16 {
			b := []*bench{one, two}[i%2]
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
