package pool_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A snapshot is restored whatever the ctime of its files is, which a backup changes that puts their atime back.
func TestRestoreWhileSnapshotIsRead(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		for _, name := range []string{"a", "b"} {
			must.Succeed(t, os.WriteFile(b.Path("pool", "pvc-1", name), []byte("content"), 0o600))
		}
		_, err := b.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s-1"), Source: id(t, "pvc-1")})
		must.Succeed(t, err)
		restored, ended := make(chan struct{}), make(chan error, 1)
		go func() {
			for {
				for _, name := range []string{"a", "b"} {
					if err := os.Chtimes(b.Own("snapshots", "~s-1", name), time.Unix(1, 0), time.Time{}); err != nil {
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
		_, err = b.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Source: &pool.Source{ID: snapshotID(t, "s-1")}})
		close(restored)
		must.Succeed(t, err, <-ended)
		if content, err := os.ReadFile(b.Path("pool", "pvc-2", "b")); err != nil || string(content) != "content" {
			t.Errorf("restored was %q, %v", content, err)
		}
	})
}

// during makes a snapshot of a volume and does something while it is copied.
func (b *bench) during(f *faulty, of string, do func()) pool.Snapshot {
	b.t.Helper()
	asked := false
	meanwhile := func() { asked = true; do() }
	f.meanwhile.Store(&meanwhile) // when the copy gets its limit
	made, err := b.Snapshots().Create(b.t.Context(), pool.SnapshotRequest{ID: snapshotID(b.t, "s-1"), Source: id(b.t, of)})
	must.Succeed(b.t, err)
	if !asked {
		b.t.Fatal("the copy was given no limit")
	}
	must.Succeed(b.t, b.Snapshots().Delete(b.t.Context(), snapshotID(b.t, "s-1")))
	b.later(time.Minute)
	return made
}

// tryPublish is what the driver does, with the lock that it takes.
func (b *bench) tryPublish(p pool.Publication) error {
	unlock, err := b.Publications().Lock(p)
	if err != nil {
		return err
	}
	defer unlock()
	return b.Publications().Publish(b.t.Context(), p)
}

// While a directory is copied by reading it, pods that only read it come and go, and it grows. None may write to it. Other volumes do not
// wait.
func TestCallsOnDirectoryWhileItIsRead(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		b.create("pvc-1", mib)
		at := func(target string, readOnly bool) pool.Publication {
			return pool.Publication{ID: id(t, "pvc-1"), Target: b.Target(target), ReadOnly: readOnly}
		}
		must.Succeed(t, b.tryPublish(at("a", true)))
		b.during(f, "pvc-1", func() {
			must.Succeed(t, b.tryPublish(at("b", true)))
			b.create("pvc-2", mib)
			must.Succeed(t, b.publish("pvc-2", "c"), b.unpublish("pvc-2", "c"))
			b.delete("pvc-2")
			wantError(t, b.tryPublish(at("c", false)), volume.ErrBusy)
			wantError(t, b.Delete(t.Context(), id(t, "pvc-1")), volume.ErrBusy)
			unlock, err := b.Publications().Lock(pool.Publication{ID: id(t, "pvc-1"), Target: b.Target("a"), SingleTarget: true})
			must.Succeed(t, err)
			_, err = b.Expand(t.Context(), id(t, "pvc-1"), b.Target("a"), volume.ModeMount, volume.Range{Required: 2 * mib})
			unlock()
			must.Succeed(t, err, b.unpublish("pvc-1", "a"), b.unpublish("pvc-1", "b"))
		})
		if v := b.volume("pvc-1"); v.Bytes != 2*mib || v.Condition.Abnormal {
			t.Errorf("the volume is %+v, want 2 MiB in order", v)
		}
		must.Succeed(t, b.tryPublish(at("c", false)), b.unpublish("pvc-1", "c"))
		b.delete("pvc-1")
		b.wantClean()
	})
}

// What a pod had while it was copied is no copy of a point in time, also if the pod ended before the copy was whole.
func TestCopyOfVolumeThatWasUsedMeanwhile(t *testing.T) {
	testenv.NeedRoot(t)
	withFaultsAt(t, testenv.LoopFS(t, "xfs", 512*mib), local, func(t *testing.T, b *bench, f *faulty) {
		b.createBlock("pvc-1", mib)
		for _, tt := range []struct {
			meanwhile func()
			want      volume.Consistency
		}{
			{func() {}, volume.PointInTime},
			{func() { must.Succeed(t, b.publishBlock("pvc-1", "a"), b.unpublish("pvc-1", "a")) }, volume.CrashConsistent},
			{func() {}, volume.PointInTime},
		} {
			if got := b.during(f, "pvc-1", tt.meanwhile).Origin.Consistency; got != tt.want {
				t.Errorf("the copy is %s, want %s", got, tt.want)
			}
		}
	})
}

// A volume that shares blocks has room to overwrite them before it does, also where a call before failed between its record and
// its limit.
func TestSourceIsLimitedAgainAfterFailure(t *testing.T) {
	testenv.NeedRoot(t)
	withFaultsAt(t, testenv.LoopFS(t, "xfs", 512*mib), local, func(t *testing.T, b *bench, f *faulty) {
		b.createBlock("pvc-1", 16*mib)
		f.failBefore.Store(true)
		wantError(t, b.snapshot("s-1", "pvc-1"), errFault)
		f.failBefore.Store(false)
		must.Succeed(t, b.snapshot("s-1", "pvc-1"))
		if got := b.limitOf("pvc-1"); got < 32*mib {
			t.Errorf("its blocks are shared, and its limit is %d bytes", got)
		}
	})
}

// Of a snapshot whose file was cut off no volume is made, which would have zeros instead of what is lost.
func TestRestoreOfShortSnapshot(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.LoopFS(t, "xfs", 512*mib)
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, root)
		b.start(thin)
		b.createBlock("pvc-1", 16*mib)
		_, err := b.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s-1"), Source: id(t, "pvc-1")})
		must.Succeed(t, err)
		restore := func(name string) error {
			_, err := b.Create(t.Context(), pool.Request{ID: id(t, name), Mode: volume.ModeBlock, Source: &pool.Source{ID: snapshotID(t, "s-1")}})
			return err
		}
		must.Succeed(t, restore("pvc-2"), os.Truncate(b.Own("snapshots", "~s-1", "disk.img"), 8*mib))
		wantError(t, restore("pvc-3"), volume.ErrLost)
	})
}

// A growth that failed may have left the file of a block volume larger than its record. Its devices show all of it, and so does what is
// restored.
func TestRestoreOfLongBlockVolume(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.createBlock("pvc-1", mib)
		must.Succeed(t, os.Truncate(b.Path("pool", "pvc-1", "disk.img"), 2*mib))
		made, err := b.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s-1"), Source: id(t, "pvc-1")})
		must.Succeed(t, err)
		restored, err := b.Create(t.Context(), pool.Request{
			ID: id(t, "pvc-2"), Mode: volume.ModeBlock, Range: volume.Range{Required: made.Origin.Bytes}, Source: &pool.Source{ID: made.ID},
		})
		if err != nil || restored.Bytes != 2*mib || b.stat("pvc-2").Size != 2*mib {
			t.Errorf("restored was %+v, %v", restored, err)
		}
		_, err = b.Create(t.Context(), pool.Request{
			ID: id(t, "pvc-3"), Mode: volume.ModeBlock, Range: volume.Range{Required: mib}, Source: &pool.Source{ID: id(t, "pvc-1")},
		})
		wantError(t, err, volume.ErrOutOfRange)
	})
}

// The file of a block volume has no device while it is read, and does not grow while its blocks come to be shared. A call that only
// makes sure of the size succeeds.
func TestCallsOnBlockVolumeWhileItIsCopied(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		b.createBlock("pvc-1", mib)
		b.during(f, "pvc-1", func() {
			wantError(t, b.publishBlock("pvc-1", "a", readOnly), volume.ErrBusy)
			must.Succeed(t, b.unpublish("pvc-1", "a"))
		})
		b.delete("pvc-1")
		b.wantClean()
	})
	testenv.NeedRoot(t)
	withFaultsAt(t, testenv.LoopFS(t, "xfs", 512*mib), local, func(t *testing.T, b *bench, f *faulty) {
		b.createBlock("pvc-1", mib)
		must.Succeed(t, b.publishBlock("pvc-1", "a"))
		b.during(f, "pvc-1", func() {}) // and its own limit, once
		b.during(f, "pvc-1", func() {
			expand := func(bytes int64) error {
				_, err := b.Expand(t.Context(), id(t, "pvc-1"), b.Target("a"), volume.ModeBlock, volume.Range{Required: bytes})
				return err
			}
			must.Succeed(t, expand(mib), b.publishBlock("pvc-1", "b"), b.unpublish("pvc-1", "b"))
			wantError(t, expand(2*mib), volume.ErrBusy)
		})
		must.Succeed(t, b.unpublish("pvc-1", "a"))
		b.delete("pvc-1")
	})
}

// Files whose ctime is in the future look changed until then. A snapshot says so at once where a pod may write to them, and
// is made where no pod can.
func TestSnapshotOfFilesOfTheFuture(t *testing.T) {
	for _, kind := range []string{"xfs", "ext4"} {
		t.Run(kind, func(t *testing.T) {
			root := testenv.FutureFS(t, kind, 512*mib, func(root string) (files []string) {
				onRoot(t, root, func(t *testing.T, b *bench) {
					b.create("pvc-1", mib)
					for _, name := range []string{"future-1", "future-2"} {
						files = append(files, b.Path("pool", "pvc-1", name))
						must.Succeed(t, os.WriteFile(files[len(files)-1], []byte("content"), 0o600))
					}
					must.Succeed(t, b.Close(t.Context()))
				})
				return files
			})
			onRoot(t, root, func(t *testing.T, b *bench) {
				snapshot := func(name string) error {
					_, err := b.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, name), Source: id(t, "pvc-1")})
					return err
				}
				must.Succeed(t, b.publish("pvc-1", "pod"))
				err := snapshot("s-1")
				if wantError(t, err, volume.ErrPrecondition); kind == "xfs" && !strings.Contains(fmt.Sprint(err), "/future-") {
					t.Errorf("published: %v, want the file", err)
				}
				must.Succeed(t, b.unpublish("pvc-1", "pod"))
				b.settled()
				must.Succeed(t, snapshot("s-2"))
				_, err = b.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Source: &pool.Source{ID: id(t, "pvc-1")}})
				must.Succeed(t, err, b.publish("pvc-1", "pod"), b.unpublish("pvc-1", "pod"))
				b.delete("pvc-1")
			})
		})
	}
}

// onRoot runs a test on a node with a pool, which may be there from one before.
func onRoot(t *testing.T, root string, test func(t *testing.T, b *bench)) {
	t.Helper()
	must.Succeed(t, os.RemoveAll(filepath.Join(root, "pods")))
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, root)
		b.start(local)
		test(t, b)
	})
}
