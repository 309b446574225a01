package pool_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// The file of a block volume can get an extent for each of its blocks. What finds them is in no promise of another volume.
func TestExtentsOfBlockVolumeLeaveOtherPromises(t *testing.T) {
	testenv.NeedRoot(t)
	for name, fs := range map[string]struct {
		kind string
		mkfs []string
	}{
		"xfs":  {"xfs", []string{"-b", "size=1024"}},
		"ext4": {"ext4", []string{"-q", "-b", "1024", "-m", "0"}},
	} {
		t.Run(name, func(t *testing.T) {
			root := testenv.MountMade(t, fs.kind, 448*mib, fs.mkfs)
			withQuotas(t, root, local, func(t *testing.T, h *harness) {
				h.createBlock("pvc-fragmented", 256*mib)
				bytes := h.capacity()
				if got := *h.inspect(local)[0].AvailableBytes; got != bytes {
					t.Errorf("inspect shows %d bytes to promise, the driver has %d", got, bytes)
				}
				h.create("pvc-other", bytes)
				writeEveryOther(t, h.Path("pool", "pvc-fragmented", "disk.img"), 256*mib, 1024)
				f := must.Value(os.Create(h.Path("pool", "pvc-other", "data")))(t)
				defer func() { must.Succeed(t, f.Close()) }()
				// Blocks that are allocated are taken from what is free, as those that are written.
				if err := unix.Fallocate(int(f.Fd()), 0, 0, bytes-mib); err != nil {
					t.Errorf("%d MiB were promised to another volume: %v", bytes/mib, err)
				}
			})
		})
	}
}

// writeEveryOther writes every other block of a file whose space is allocated: each is an extent of its own from then on, and so is what is between two.
func writeEveryOther(t *testing.T, path string, bytes, block int64) {
	t.Helper()
	f := must.Value(os.OpenFile(path, os.O_WRONLY, 0))(t)
	for at := int64(0); at < bytes; at += 2 * block {
		must.Value(f.WriteAt(make([]byte, block), at))(t)
	}
	must.Succeed(t, f.Sync())
	must.Succeed(t, f.Close())
}
