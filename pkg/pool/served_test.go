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
func remembering(t *testing.T, test func(t *testing.T, b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		b.memory = t.TempDir()
		b.start(localAndOld)
		b.createIn("old", "pvc-old", mib)
		b.createIn("local", "pvc-new", mib)
		test(t, b)
	})
}

func (b *bench) wantOutOfUse(name string) {
	b.t.Helper()
	err := b.Delete(b.t.Context(), id(b.t, name))
	must.ErrorIs(b.t, err, volume.ErrPrecondition)
	if !strings.Contains(err.Error(), `pool "old"`) || !strings.Contains(err.Error(), "forget-pool --pool=old") {
		b.t.Errorf("the error is %q, want the pool and what to do", err)
	}
}

func TestDeleteOfVolumeInPoolOutOfUseIsRefused(t *testing.T) {
	remembering(t, func(t *testing.T, b *bench) {
		b.restart(local)
		b.wantOutOfUse("pvc-old")
		must.ErrorIs(t, b.Delete(t.Context(), id(t, "pvc-gone")), volume.ErrNotFound)
		b.delete("pvc-new")
		if _, err := os.Stat(b.Path("old", "pvc-old")); err != nil {
			t.Error(err)
		}
		b.restart(localAndOld) // taken into use again
		b.delete("pvc-old")
		b.restart(local)
		must.ErrorIs(t, b.Delete(t.Context(), id(t, "pvc-old")), volume.ErrNotFound)
	})
}

// What was made since the volumes were noted is not known: then nothing is taken for deleted.
func TestDeleteAfterKillMayBeOfPoolOutOfUse(t *testing.T) {
	remembering(t, func(t *testing.T, b *bench) {
		b.later(2 * time.Minute)
		memory := t.TempDir()
		b.createIn("old", "pvc-late", mib)
		must.Succeed(t, os.CopyFS(memory, os.DirFS(b.memory)))
		b.memory = memory // as it was at that time
		b.restart(local)
		for _, name := range []string{"pvc-late", "pvc-old", "pvc-unknown"} {
			b.wantOutOfUse(name)
		}
		remembered := served.In(memory)
		pools, err := remembered.OutOfUse(func(p served.Entry) bool { return p.Name == "local" })
		must.Succeed(t, err)
		for _, p := range pools {
			must.Succeed(t, remembered.Forget(p))
		}
		must.ErrorIs(t, b.Delete(t.Context(), id(t, "pvc-late")), volume.ErrNotFound)
	})
}

// What is in the place of a pool by now says nothing of what became of that.
func TestDeleteOfVolumeInReplacedPoolIsRefused(t *testing.T) {
	remembering(t, func(t *testing.T, b *bench) {
		must.Succeed(t, b.Close(t.Context()))
		must.Succeed(t, os.Rename(b.Path("old"), b.Path("aside")))
		b.start(localAndOld)
		b.wantOutOfUse("pvc-old")
		b.restart(`[{"name":"local","path":"pool"},{"name":"other","path":"aside"}]`)
		b.delete("pvc-old")
	})
}

// A snapshot of the upstream KubeVirt driver is in no index.
func TestDeleteOfUpstreamSnapshotInPoolOutOfUseIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		b.memory = t.TempDir()
		path := b.Path("old", "snapshots", "snapshot-1")
		must.Succeed(t, os.MkdirAll(filepath.Join(path, "data"), 0o755))
		must.Succeed(t, os.MkdirAll(filepath.Join(path, "pvc-1"), 0o755))
		b.start(`[{"name":"local","path":"pool"},{"name":"old","path":"old","snapshotPath":"old/snapshots","snapshotProvider":"reflink"}]`)
		b.restart(local)
		snapshot, err := volume.ParseSnapshot("snapshot-1")
		must.Succeed(t, err)
		must.ErrorIs(t, b.Snapshots().Delete(t.Context(), snapshot), volume.ErrPrecondition)
	})
}

// A driver may start before the disk of a pool is mounted, and opens the bare directory then.
func TestDeleteOfVolumeOnUnmountedDiskIsRefused(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		b.memory = t.TempDir()
		must.Succeed(t, os.Mkdir(b.Path("disk"), 0o755))
		disk(t, b)
		const onDisk = `[{"name":"local","path":"pool"},{"name":"old","path":"disk/pool"}]`
		b.start(onDisk)
		b.createIn("old", "pvc-old", mib)
		must.Succeed(t, b.Close(t.Context()))
		must.Succeed(t, syscall.Unmount(b.Path("disk"), 0))
		b.start(onDisk)
		b.wantOutOfUse("pvc-old")
		must.ErrorIs(t, b.Delete(t.Context(), id(t, "pvc-gone")), volume.ErrNotFound)
		must.Succeed(t, b.Close(t.Context()))
	})
}

// The directory below a mount, whether on the disk of the operating system or on another one, has its volumes still.
func TestDeleteOfVolumeBelowMountIsRefused(t *testing.T) {
	testenv.NeedRoot(t)
	for name, ownDisk := range map[string]bool{"on the disk of the system": false, "on a disk": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, t.TempDir())
				b.memory = t.TempDir()
				must.Succeed(t, os.Mkdir(b.Path("disk"), 0o755))
				if ownDisk {
					disk(t, b)
				}
				const pools = `[{"name":"local","path":"pool"},{"name":"old","path":"disk"}]`
				b.start(pools)
				b.createIn("old", "pvc-old", mib)
				must.Succeed(t, b.Close(t.Context()))
				disk(t, b) // over it
				b.start(pools)
				b.later(2 * time.Minute)
				b.wantOutOfUse("pvc-old")
				b.restart(pools)
				b.wantOutOfUse("pvc-old")
				must.Succeed(t, b.Close(t.Context()), syscall.Unmount(b.Path("disk"), 0))
				b.start(pools)
				b.delete("pvc-old")
			})
		})
	}
}
