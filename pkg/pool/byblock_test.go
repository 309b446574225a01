package pool_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// XFS takes 128 KiB for each shared block that is written, and keeps them for half an hour and longer. What a volume has above its promise when its
// snapshot is deleted would be sold twice.
func TestWritesToSharedDiskTakeSingleBlocks(t *testing.T) {
	testenv.NeedRoot(t)
	const size, every = 64 * mib, 128 << 10
	root := testenv.MountMade(t, "xfs", 1024*mib, nil)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.createBlock("pvc-source", size)
		h.create("pvc-directory", 2*size)
		disk := func(name string) *os.File {
			t.Helper()
			return must.Value(os.OpenFile(h.Path("pool", name, "disk.img"), os.O_WRONLY|os.O_CREATE, 0o600))(t)
		}
		for name, snapshot := range map[string]string{"pvc-source": "s-1", "pvc-directory": "s-2"} {
			f := disk(name)
			must.Value(f.WriteAt(make([]byte, size), 0))(t)
			must.Succeed(t, f.Sync(), f.Close())
			awaitTick(t, root)
			must.Succeed(t, h.snapshot(snapshot, name))
		}
		must.Value(h.Create(t.Context(), pool.Request{
			ID: id(t, "pvc-restored"), Pool: poolName(t, "local"), Mode: volume.ModeBlock, Range: volume.Range{Required: size}, Source: &pool.Source{ID: snapshotID(t, "s-1")},
		}))(t)
		for _, name := range []string{"pvc-source", "pvc-restored", "pvc-directory"} {
			f := disk(name)
			for at := int64(0); at < size; at += every {
				must.Value(f.WriteAt([]byte("changed"), at))(t)
			}
			must.Succeed(t, f.Sync())
			var st unix.Stat_t
			must.Succeed(t, unix.Fstat(int(f.Fd()), &st), f.Close())
			if most := int64(size + mib); st.Blocks*512 > most {
				t.Errorf("%s has %d KiB, want at most %d", name, st.Blocks/2, most>>10)
			}
		}
	})
}
