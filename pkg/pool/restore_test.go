package pool_test

import (
	"os"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/test/must"
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
