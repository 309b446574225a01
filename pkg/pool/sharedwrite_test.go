package pool_test

import (
	"math/rand/v2"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A disk whose blocks were all written after a snapshot has not become one of single blocks, which take the next snapshot long to share.
func TestDiskIsNotInSingleBlocksAfterSnapshot(t *testing.T) {
	testenv.NeedRoot(t)
	const size, block = 32 * mib, 4096
	root := testenv.MountMade(t, "xfs", 512*mib, nil)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.createBlock("pvc-disk", size)
		f := openDirect(t, h.Path("pool", "pvc-disk", "disk.img"))
		fill(t, f, size)
		must.Succeed(t, h.snapshot("s-1", "pvc-disk"))
		changed := aligned(block)
		for _, n := range rand.New(rand.NewPCG(1, 2)).Perm(size / block) {
			must.Value(f.WriteAt(changed, int64(n)*block))(t)
		}
		if got, most := must.Value(clone.Extents(f))(t), size/(64<<10); got >= most {
			t.Errorf("the disk has %d extents, want less than %d", got, most)
		}
	})
}

// openDirect opens a file, until the test ends.
func openDirect(t *testing.T, path string) *os.File {
	t.Helper()
	f := must.Value(os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_DIRECT, 0o600))(t)
	t.Cleanup(func() { must.Succeed(t, f.Close()) })
	return f
}

func fill(t *testing.T, f *os.File, bytes int64) {
	t.Helper()
	for at := int64(0); at < bytes; at += mib {
		must.Value(f.WriteAt(aligned(mib), at))(t)
	}
	must.Succeed(t, f.Sync())
}

// aligned is a buffer for direct writes.
func aligned(bytes int) []byte {
	buffer := make([]byte, bytes+4096)
	at := -uintptr(unsafe.Pointer(unsafe.SliceData(buffer))) & 4095
	return buffer[at:][:bytes]
}
