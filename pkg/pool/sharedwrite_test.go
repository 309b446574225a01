package pool_test

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// XFS takes as much as the extent size hint of a file says for each shared block that is written, and keeps it while the file is open for writing.
// What a block volume has of that above its promise is not sold when its snapshot is deleted.
func TestWhatSharedBlocksKeepIsNotSold(t *testing.T) {
	testenv.NeedRoot(t)
	const size = 128 * mib
	for name, c := range map[string]struct {
		mkfs []string
		hint string           // that the file gets before it is filled
		then func(h *harness) // before the rest is sold
	}{
		"a hint of the filesystem":         {mkfs: []string{"-d", "extszinherit=256"}},
		"a hint of the file":               {hint: "extsize 1m"},
		"a hint, and the driver restarts":  {hint: "cowextsize 1m", then: func(h *harness) { h.restart(local) }},
		"a hint, and use is counted again": {hint: "cowextsize 1m", then: func(h *harness) { h.later(2 * time.Minute) }},
	} {
		t.Run(name, func(t *testing.T) {
			root := testenv.MountMade(t, "xfs", 512*mib, c.mkfs)
			withQuotas(t, root, local, func(t *testing.T, h *harness) {
				const least = 100 * mib
				h.createBlock("pvc-disk", size)
				h.create("pvc-empty", least)
				f := openDisk(t, h, "pvc-disk", c.hint)
				fill(t, f, size)
				must.Succeed(t, h.snapshot("s-1", "pvc-disk"))
				for at := int64(0); at < size; at += mib {
					must.Value(f.WriteAt(aligned(4096), at))(t)
				}
				must.Succeed(t, h.Snapshots().Delete(t.Context(), snapshotID(t, "s-1")))
				h.settled()
				if c.then != nil {
					c.then(h)
				}
				wantTwice(t, f, size)
				capacity := h.capacity()
				if got := *h.inspect(local)[0].AvailableBytes; got != capacity {
					t.Errorf("inspect shows %d bytes to promise, the driver has %d", got, capacity)
				}
				h.createBlock("pvc-other", capacity) // takes its space at once
				fill(t, openDirect(t, h.Path("pool", "pvc-empty", "data")), least)
			})
		})
	}
}

// What a volume does not keep any more can be sold once it is measured again, and what a deleted one has kept once it is erased.
func TestWhatSharedBlocksKeptIsSoldLater(t *testing.T) {
	testenv.NeedRoot(t)
	const size = 128 * mib
	root := testenv.MountMade(t, "xfs", 512*mib, nil)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("pvc-other", size)
		fill(t, openDirect(t, h.Path("pool", "pvc-other", "data")), size*3/4)
		empty := h.capacity()
		h.createBlock("pvc-disk", size)
		f := openDisk(t, h, "pvc-disk", "extsize 1m")
		fill(t, f, size)
		full := h.capacity()
		must.Succeed(t, h.snapshot("s-1", "pvc-disk"))
		for at := int64(0); at < size; at += mib {
			must.Value(f.WriteAt(aligned(4096), at))(t)
		}
		must.Succeed(t, h.Snapshots().Delete(t.Context(), snapshotID(t, "s-1")))
		h.settled()
		wantTwice(t, f, size)
		if got, most := h.capacity(), full-size*7/8; got > most {
			t.Errorf("%d MiB are to be had while the disk has twice its size, want at most %d", got/mib, most/mib)
		}
		must.Succeed(t, f.Truncate(0)) // XFS frees what was removed some time later
		h.later(2 * time.Minute)
		if got := h.capacity(); got < full {
			t.Errorf("%d MiB are to be had once the disk has no more, want %d", got/mib, full/mib)
		}
		h.delete("pvc-disk")
		h.settled()
		if got := h.capacity(); got < empty-mib {
			t.Errorf("%d MiB are to be had without the disk, want %d", got/mib, empty/mib)
		}
	})
}

// wantTwice says that the kernel keeps as much for a file as it holds.
func wantTwice(t *testing.T, f *os.File, bytes int64) {
	t.Helper()
	var st unix.Stat_t
	must.Succeed(t, unix.Fstat(int(f.Fd()), &st))
	if least := bytes * 15 / 8; st.Blocks*512 < least {
		t.Fatalf("the file has %d MiB, want at least %d", st.Blocks/2048, least/mib)
	}
}

// A disk whose blocks were all written after a snapshot has not become one of single blocks, which take the next snapshot long to share.
func TestDiskIsNotInSingleBlocksAfterSnapshot(t *testing.T) {
	testenv.NeedRoot(t)
	const size, block = 32 * mib, 4096
	root := testenv.MountMade(t, "xfs", 512*mib, nil)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.createBlock("pvc-disk", size)
		f := openDisk(t, h, "pvc-disk", "")
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

// openDisk opens the file of a block volume as a virtual machine does, and gives it a hint before that, as xfs_io(8) names it.
func openDisk(t *testing.T, h *harness, name, hint string) *os.File {
	t.Helper()
	path := h.Path("pool", name, "disk.img")
	if hint != "" { // XFS takes one of a file that has nothing
		must.Succeed(t, os.Truncate(path, 0), exec.CommandContext(t.Context(), "xfs_io", "-c", hint, path).Run())
	}
	return openDirect(t, path)
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
