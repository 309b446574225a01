package pool_test

import (
	"os"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// On btrfs an extent is there until all of it is overwritten. Where that is not counted, a block volume shares none: with a snapshot each day, of
// which the older is deleted, it would outgrow its promise, and what it takes would be sold to others.
func TestBlockVolumeStaysWithinPromiseWhereBtrfsDoesNotCount(t *testing.T) {
	const used, empty = 128 * mib, 800 * mib
	root := testenv.LoopFS(t, "btrfs", 2<<30)
	withQuotas(t, root, thin, func(t *testing.T, h *harness) {
		h.createBlock("pvc-used", used)
		h.createBlock("pvc-empty", empty)
		disk := h.Path("pool", "pvc-used", "disk.img")
		writeBut(t, disk, used, -1)
		for round := range 5 {
			must.Succeed(t, h.snapshot("s-1", "pvc-used"))
			writeBut(t, disk, used, round)
			must.Succeed(t, h.Snapshots().Delete(t.Context(), snapshotID(t, "s-1")))
			h.settled()
			syncfs(t, root)
		}
		d := must.Value(dir.Open(root))(t)
		space := must.Value(dir.SpaceOf(d))(t)
		must.Succeed(t, d.Close())
		if bytes := h.capacity(); bytes+empty > space.FreeBytes {
			t.Errorf("%d MiB can be promised, and %d are promised and not written, but %d are free", bytes/mib, empty/mib, space.FreeBytes/mib)
		}
		made, err := h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s-2"), Source: id(t, "pvc-used")})
		must.Succeed(t, err)
		if made.Origin.Method != volume.ByCopy {
			t.Errorf("the snapshot was made by %s", made.Origin.Method)
		}
		_, err = h.Create(t.Context(), pool.Request{ID: id(t, "pvc-restored"), Mode: volume.ModeBlock, Pool: poolName(t, "local"), Source: &pool.Source{ID: snapshotID(t, "s-2")}})
		must.Succeed(t, err)
		must.Succeed(t, h.publishBlock("pvc-used", "a"))
		err = h.snapshot("s-3", "pvc-used")
		must.ErrorIs(t, err, volume.ErrPrecondition)
		if !strings.Contains(err.Error(), "btrfs quota enable") {
			t.Errorf("%v does not say what to do", err)
		}
	})
}

// writeBut writes a file but for the first blocks of each 64, which have gone cold.
func writeBut(t *testing.T, path string, bytes int64, but int) {
	t.Helper()
	f := must.Value(os.OpenFile(path, os.O_WRONLY, 0))(t)
	block := make([]byte, 4096)
	for n := range bytes / 4096 {
		if n%64 > int64(but) {
			block[0]++
			must.Value(f.WriteAt(block, n*4096))(t)
		}
	}
	must.Succeed(t, f.Sync())
	must.Succeed(t, f.Close())
}
