package pool_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/freezer"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A snapshot is restored whatever the ctime of its files is, which a backup changes that puts their atime back.
func TestRestoreWhileSnapshotIsRead(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		for _, name := range []string{"a", "b"} {
			must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-1", name), []byte("content"), 0o600))
		}
		_, err := h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s-1"), Source: id(t, "pvc-1")})
		must.Succeed(t, err)
		restored, ended := make(chan struct{}), make(chan error, 1)
		go func() {
			for {
				for _, name := range []string{"a", "b"} {
					if err := os.Chtimes(h.Own("snapshots", "~s-1", name), time.Unix(1, 0), time.Time{}); err != nil {
						ended <- err
						return
					}
				}
				select {
				case <-restored:
					ended <- nil
					return
				default:
				}
			}
		}()
		_, err = h.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Source: &pool.Source{ID: snapshotID(t, "s-1")}})
		close(restored)
		must.Succeed(t, err, <-ended)
		if content, err := os.ReadFile(h.Path("pool", "pvc-2", "b")); err != nil || string(content) != "content" {
			t.Errorf("restored was %q, %v", content, err)
		}
	})
}

// during makes a snapshot of a volume and does something while it is copied.
func (h *harness) during(f *faulty, of string, do func()) pool.Snapshot {
	h.t.Helper()
	asked := false
	meanwhile := func() { asked = true; do() }
	f.meanwhile.Store(&meanwhile) // when the copy gets its limit
	made, err := h.Snapshots().Create(h.t.Context(), pool.SnapshotRequest{ID: snapshotID(h.t, "s-1"), Source: id(h.t, of)})
	must.Succeed(h.t, err)
	if !asked {
		h.t.Fatal("the copy was given no limit")
	}
	must.Succeed(h.t, h.Snapshots().Delete(h.t.Context(), snapshotID(h.t, "s-1")))
	h.later(time.Minute)
	return made
}

// tryPublish is what the driver does, with the lock that it takes.
func (h *harness) tryPublish(p pool.Publication) error {
	unlock, err := h.Publications().Lock(p)
	if err != nil {
		return err
	}
	defer unlock()
	return h.Publications().Publish(h.t.Context(), p)
}

// While a directory is copied by reading it, pods that only read it come and go, and it grows. None may write to it. Other volumes do not
// wait.
func TestCallsOnDirectoryWhileItIsRead(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		h.create("pvc-1", mib)
		at := func(target string, readOnly bool) pool.Publication {
			return pool.Publication{ID: id(t, "pvc-1"), Target: h.Target(target), ReadOnly: readOnly}
		}
		must.Succeed(t, h.tryPublish(at("a", true)))
		h.during(f, "pvc-1", func() {
			must.Succeed(t, h.tryPublish(at("b", true)))
			h.create("pvc-2", mib)
			must.Succeed(t, h.publish("pvc-2", "c"), h.unpublish("pvc-2", "c"))
			h.delete("pvc-2")
			wantError(t, h.tryPublish(at("c", false)), volume.ErrBusy)
			wantError(t, h.Delete(t.Context(), id(t, "pvc-1")), volume.ErrBusy)
			unlock, err := h.Publications().Lock(pool.Publication{ID: id(t, "pvc-1"), Target: h.Target("a"), SingleTarget: true})
			must.Succeed(t, err)
			_, err = h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), volume.ModeMount, volume.Range{Required: 2 * mib})
			unlock()
			must.Succeed(t, err, h.unpublish("pvc-1", "a"), h.unpublish("pvc-1", "b"))
		})
		if v := h.volume("pvc-1"); v.Bytes != 2*mib || v.Condition.Abnormal {
			t.Errorf("the volume is %+v, want 2 MiB in order", v)
		}
		must.Succeed(t, h.tryPublish(at("c", false)), h.unpublish("pvc-1", "c"))
		h.delete("pvc-1")
		h.wantClean()
	})
}

// What a pod had while it was copied is no copy of a point in time, also if the pod ended before the copy was whole.
func TestCopyOfVolumeThatWasUsedMeanwhile(t *testing.T) {
	testenv.NeedRoot(t)
	withFaultsAt(t, testenv.LoopFS(t, "xfs", 512*mib), local, func(t *testing.T, h *harness, f *faulty) {
		h.createBlock("pvc-1", mib)
		for _, tt := range []struct {
			meanwhile func()
			want      volume.Consistency
		}{
			{func() {}, volume.PointInTime},
			{func() { must.Succeed(t, h.publishBlock("pvc-1", "a"), h.unpublish("pvc-1", "a")) }, volume.CrashConsistent},
			{func() {}, volume.PointInTime},
		} {
			if got := h.during(f, "pvc-1", tt.meanwhile).Origin.Consistency; got != tt.want {
				t.Errorf("the copy is %s, want %s", got, tt.want)
			}
		}
	})
}

// A volume that shares blocks has room to overwrite them before it does, also where a call before failed between its record and
// its limit.
func TestSourceIsLimitedAgainAfterFailure(t *testing.T) {
	testenv.NeedRoot(t)
	withFaultsAt(t, testenv.LoopFS(t, "xfs", 512*mib), local, func(t *testing.T, h *harness, f *faulty) {
		h.createBlock("pvc-1", 16*mib)
		f.failBefore.Store(true)
		wantError(t, h.snapshot("s-1", "pvc-1"), errFault)
		f.failBefore.Store(false)
		must.Succeed(t, h.snapshot("s-1", "pvc-1"))
		if got := h.limitOf("pvc-1"); got < 32*mib {
			t.Errorf("its blocks are shared, and its limit is %d bytes", got)
		}
	})
}

// Of a snapshot whose file was cut off no volume is made, which would have zeros instead of what is lost.
func TestRestoreOfShortSnapshot(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.LoopFS(t, "xfs", 512*mib)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.start(thin)
		h.createBlock("pvc-1", 16*mib)
		must.Succeed(t, must.Err(h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s-1"), Source: id(t, "pvc-1")})))
		restore := func(name string) error {
			return must.Err(h.Create(t.Context(), pool.Request{ID: id(t, name), Mode: volume.ModeBlock, Source: &pool.Source{ID: snapshotID(t, "s-1")}}))
		}
		must.Succeed(t, restore("pvc-2"), os.Truncate(h.Own("snapshots", "~s-1", "disk.img"), 8*mib))
		wantError(t, restore("pvc-3"), volume.ErrLost)
	})
}

// A growth that failed may have left the file of a block volume larger than its record. Its devices show all of it, and so does what is
// restored.
func TestRestoreOfLongBlockVolume(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.createBlock("pvc-1", mib)
		must.Succeed(t, os.Truncate(h.Path("pool", "pvc-1", "disk.img"), 2*mib))
		made, err := h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s-1"), Source: id(t, "pvc-1")})
		must.Succeed(t, err)
		restored, err := h.Create(t.Context(), pool.Request{
			ID: id(t, "pvc-2"), Mode: volume.ModeBlock, Range: volume.Range{Required: made.Origin.Bytes}, Source: &pool.Source{ID: made.ID},
		})
		if err != nil || restored.Bytes != 2*mib || h.stat("pvc-2").Size != 2*mib {
			t.Errorf("restored was %+v, %v", restored, err)
		}
		_, err = h.Create(t.Context(), pool.Request{
			ID: id(t, "pvc-3"), Mode: volume.ModeBlock, Range: volume.Range{Required: mib}, Source: &pool.Source{ID: id(t, "pvc-1")},
		})
		wantError(t, err, volume.ErrOutOfRange)
	})
}

// The file of a block volume has no device while it is read, and does not grow while its blocks come to be shared. A call that only
// makes sure of the size succeeds.
func TestCallsOnBlockVolumeWhileItIsCopied(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		h.createBlock("pvc-1", mib)
		h.during(f, "pvc-1", func() {
			wantError(t, h.publishBlock("pvc-1", "a", readOnly), volume.ErrBusy)
			must.Succeed(t, h.unpublish("pvc-1", "a"))
		})
		h.delete("pvc-1")
		h.wantClean()
	})
	testenv.NeedRoot(t)
	withFaultsAt(t, testenv.LoopFS(t, "xfs", 512*mib), local, func(t *testing.T, h *harness, f *faulty) {
		h.createBlock("pvc-1", mib)
		must.Succeed(t, h.publishBlock("pvc-1", "a"))
		h.during(f, "pvc-1", func() {}) // and its own limit, once
		h.during(f, "pvc-1", func() {
			expand := func(bytes int64) error {
				return must.Err(h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), volume.ModeBlock, volume.Range{Required: bytes}))
			}
			must.Succeed(t, expand(mib), h.publishBlock("pvc-1", "b"), h.unpublish("pvc-1", "b"))
			wantError(t, expand(2*mib), volume.ErrBusy)
		})
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		h.delete("pvc-1")
	})
}

// Files whose ctime is in the future look changed until then. A snapshot says so at once where a pod may write to them, and
// is made where no pod can.
func TestSnapshotOfFilesOfTheFuture(t *testing.T) {
	for _, kind := range []string{"xfs", "ext4"} {
		t.Run(kind, func(t *testing.T) {
			root := testenv.FutureFS(t, kind, 512*mib, func(root string) (files []string) {
				onRoot(t, root, func(t *testing.T, h *harness) {
					h.create("pvc-1", mib)
					for _, name := range []string{"future-1", "future-2"} {
						files = append(files, h.Path("pool", "pvc-1", name))
						must.Succeed(t, os.WriteFile(files[len(files)-1], []byte("content"), 0o600))
					}
					must.Succeed(t, h.Close(t.Context()))
				})
				return files
			})
			onRoot(t, root, func(t *testing.T, h *harness) {
				snapshot := func(name string) error {
					return must.Err(h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, name), Source: id(t, "pvc-1")}))
				}
				must.Succeed(t, h.publish("pvc-1", "pod"))
				err := snapshot("s-1")
				if wantError(t, err, volume.ErrPrecondition); kind == "xfs" && !strings.Contains(fmt.Sprint(err), "/future-") {
					t.Errorf("published: %v, want the file", err)
				}
				must.Succeed(t, h.unpublish("pvc-1", "pod"))
				h.settled()
				must.Succeed(t, snapshot("s-2"))
				_, err = h.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Source: &pool.Source{ID: id(t, "pvc-1")}})
				must.Succeed(t, err, h.publish("pvc-1", "pod"), h.unpublish("pvc-1", "pod"))
				h.delete("pvc-1")
			})
		})
	}
}

// onRoot runs a test on a node with a pool, which may be there from one before.
func onRoot(t *testing.T, root string, test func(t *testing.T, b *harness)) {
	t.Helper()
	must.Succeed(t, os.RemoveAll(filepath.Join(root, "pods")))
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.start(local)
		test(t, h)
	})
}

// A freezer has something happen while it stops pods.
type freezerMeanwhile func()

func (do freezerMeanwhile) Freeze(ctx context.Context, _ []freezer.Pod) (still context.Context, thaw func() error, err error) {
	do()
	return ctx, func() error { return nil }, nil
}

// A pod that gets the volume while others are being stopped is not stopped itself, and what it writes through a mapping does not show: the
// copy is not said to be of one moment.
func TestPodComesWhileOthersAreStopped(t *testing.T) {
	root := testenv.LoopFS(t, "xfs", 512*mib)
	target := func(pod int) string { return fmt.Sprintf("0a1b2c3d-0000-4000-8000-%012d/volumes/mount", pod) }
	for name, comes := range map[string]bool{"none comes": false, "one comes": true} {
		t.Run(name, func(t *testing.T) {
			at := filepath.Join(root, fmt.Sprint(comes))
			must.Succeed(t, os.Mkdir(at, 0o755))
			h := newHarness(t, at)
			for pod := range 2 {
				must.Succeed(t, os.MkdirAll(filepath.Dir(h.Path("pods", target(pod))), 0o755))
			}
			var stop func()
			asked := false
			h.freezer = freezerMeanwhile(func() {
				asked = true
				if stop(); comes {
					must.Succeed(t, h.publish("pvc-1", target(1)))
				}
			})
			h.begin("node-1", local)
			must.Succeed(t, h.Wait(t.Context()))
			h.create("pvc-1", mib)
			must.Succeed(t, h.publish("pvc-1", target(0)))
			stop = rewritten(t, h.Path("pool", "pvc-1"))
			var made pool.Snapshot
			var err error
			for n := 0; n < 1000 && !asked; n++ { // a copy may be made between two writes
				made, err = h.Snapshots().Create(t.Context(), pool.SnapshotRequest{
					ID: snapshotID(t, fmt.Sprint("s-", n)), Source: id(t, "pvc-1"), Way: pool.CopyWay{WhenWritten: volume.Freeze},
				})
			}
			if stop(); !asked {
				t.Fatal("no pods were to be stopped")
			}
			switch {
			case comes:
				wantError(t, err, volume.ErrPrecondition)
			case err != nil || made.Origin.Consistency != volume.PointInTime:
				t.Errorf("it is %s, %v", made.Origin.Consistency, err)
			}
		})
	}
}

// rewritten has two files of a directory be written all the time until stop is called.
func rewritten(t *testing.T, at string) (stop func()) {
	end, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			for _, name := range []string{"a", "b"} {
				if err := os.WriteFile(filepath.Join(at, name), nil, 0o600); err != nil {
					ended <- err
					return
				}
			}
			select {
			case <-end:
				ended <- nil
				return
			default:
			}
		}
	}()
	return sync.OnceFunc(func() {
		t.Helper()
		close(end)
		must.Succeed(t, <-ended)
	})
}
