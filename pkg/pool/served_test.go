package pool_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool/served"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const localAndOld = `[{"name":"local","path":"pool"},{"name":"old","path":"old"}]`

// remembering starts a node that remembers its pools, with a volume in each.
func remembering(t *testing.T, test func(t *testing.T, b *harness)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		h.memory = t.TempDir()
		h.start(localAndOld)
		h.createIn("old", "pvc-old", mib)
		h.createIn("local", "pvc-new", mib)
		test(t, h)
	})
}

func (h *harness) wantOutOfUse(name string) {
	h.t.Helper()
	err := h.Delete(h.t.Context(), id(h.t, name))
	must.ErrorIs(h.t, err, volume.ErrPrecondition)
	if !strings.Contains(err.Error(), `pool "old"`) || !strings.Contains(err.Error(), "forget-pool --pool=old") {
		h.t.Errorf("the error is %q, want the pool and what to do", err)
	}
}

func TestDeleteOfVolumeInPoolOutOfUseIsRefused(t *testing.T) {
	remembering(t, func(t *testing.T, h *harness) {
		h.restart(local)
		h.wantOutOfUse("pvc-old")
		must.ErrorIs(t, h.Delete(t.Context(), id(t, "pvc-gone")), volume.ErrNotFound)
		h.delete("pvc-new")
		if _, err := os.Stat(h.Path("old", "pvc-old")); err != nil {
			t.Error(err)
		}
		h.restart(localAndOld) // taken into use again
		h.delete("pvc-old")
		h.restart(local)
		must.ErrorIs(t, h.Delete(t.Context(), id(t, "pvc-old")), volume.ErrNotFound)
	})
}

// What was made since the volumes were noted is not known: then nothing is taken for deleted.
func TestDeleteAfterKillMayBeOfPoolOutOfUse(t *testing.T) {
	remembering(t, func(t *testing.T, h *harness) {
		h.later(2 * time.Minute)
		memory := t.TempDir()
		h.createIn("old", "pvc-late", mib)
		must.Succeed(t, os.CopyFS(memory, os.DirFS(h.memory)))
		h.memory = memory // as it was at that time
		h.restart(local)
		for _, name := range []string{"pvc-late", "pvc-old", "pvc-unknown"} {
			h.wantOutOfUse(name)
		}
		remembered := served.In(memory)
		pools := must.Value(remembered.OutOfUse(func(p served.Entry) bool { return p.Name == "local" }))(t)
		for _, p := range pools {
			must.Succeed(t, remembered.Forget(p))
		}
		must.ErrorIs(t, h.Delete(t.Context(), id(t, "pvc-late")), volume.ErrNotFound)
	})
}

// What is in the place of a pool by now says nothing of what became of that.
func TestDeleteOfVolumeInReplacedPoolIsRefused(t *testing.T) {
	remembering(t, func(t *testing.T, h *harness) {
		must.Succeed(t, h.Close(t.Context()))
		must.Succeed(t, os.Rename(h.Path("old"), h.Path("aside")))
		h.start(localAndOld)
		h.wantOutOfUse("pvc-old")
		h.restart(`[{"name":"local","path":"pool"},{"name":"other","path":"aside"}]`)
		h.delete("pvc-old")
	})
}

// A snapshot of the upstream KubeVirt driver is in no index.
func TestDeleteOfUpstreamSnapshotInPoolOutOfUseIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		h.memory = t.TempDir()
		path := h.Path("old", "snapshots", "snapshot-1")
		must.Succeed(t, os.MkdirAll(filepath.Join(path, "data"), 0o755))
		must.Succeed(t, os.MkdirAll(filepath.Join(path, "pvc-1"), 0o755))
		h.start(`[{"name":"local","path":"pool"},{"name":"old","path":"old","snapshotPath":"old/snapshots","snapshotProvider":"reflink"}]`)
		h.restart(local)
		snapshot := must.Value(volume.ParseSnapshot("snapshot-1"))(t)
		must.ErrorIs(t, h.Snapshots().Delete(t.Context(), snapshot), volume.ErrPrecondition)
	})
}

// A driver may start before the disk of a pool is mounted, and opens the bare directory then.
func TestDeleteOfVolumeOnUnmountedDiskIsRefused(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		h.memory = t.TempDir()
		must.Succeed(t, os.Mkdir(h.Path("disk"), 0o755))
		disk(t, h)
		const onDisk = `[{"name":"local","path":"pool"},{"name":"old","path":"disk/pool"}]`
		h.start(onDisk)
		h.createIn("old", "pvc-old", mib)
		must.Succeed(t, h.Close(t.Context()))
		must.Succeed(t, syscall.Unmount(h.Path("disk"), 0))
		h.start(onDisk)
		h.wantOutOfUse("pvc-old")
		must.ErrorIs(t, h.Delete(t.Context(), id(t, "pvc-gone")), volume.ErrNotFound)
		must.Succeed(t, h.Close(t.Context()))
	})
}

// The directory below a mount, whether on the disk of the operating system or on another one, has its volumes still.
func TestDeleteOfVolumeBelowMountIsRefused(t *testing.T) {
	testenv.NeedRoot(t)
	for name, ownDisk := range map[string]bool{"on the disk of the system": false, "on a disk": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, t.TempDir())
				h.memory = t.TempDir()
				must.Succeed(t, os.Mkdir(h.Path("disk"), 0o755))
				if ownDisk {
					disk(t, h)
				}
				const pools = `[{"name":"local","path":"pool"},{"name":"old","path":"disk"}]`
				h.start(pools)
				h.createIn("old", "pvc-old", mib)
				must.Succeed(t, h.Close(t.Context()))
				disk(t, h) // over it
				h.start(pools)
				h.later(2 * time.Minute)
				h.wantOutOfUse("pvc-old")
				h.restart(pools)
				h.wantOutOfUse("pvc-old")
				must.Succeed(t, h.Close(t.Context()), syscall.Unmount(h.Path("disk"), 0))
				h.start(pools)
				h.delete("pvc-old")
			})
		})
	}
}
