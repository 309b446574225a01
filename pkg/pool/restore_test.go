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
		_, err := b.Snapshot(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s-1"), Source: id(t, "pvc-1")})
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
					_, err := b.Snapshot(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, name), Source: id(t, "pvc-1")})
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
