// Package blocks tests that a block volume is a disk: with the real program, real loop
// devices and a kernel that is asked to lose something. On the host the pools are on
// XFS and ext4, and on btrfs with its limits; in the guest of test/cmd/kernel on XFS and
// ext4 with theirs.
package blocks

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// A check has a driver of its own, on an empty pool.
type check struct {
	name string
	run  func(b *harness)
	// allocation is the pool option of that name.
	allocation string
	// device: it is about the device, whatever filesystem the file of that is on.
	device bool
}

var checks = []check{
	{"what was written is there after restarts and crashes, on the same device", survivesRestarts, "thick", false},
	{"a read-only publication refuses writes", refusesWrites, "thick", true},
	{"targets share a device, and the last takes it with it", sharesDevice, "thick", true},
	{"a device that its pod altered is restored", survivesAlteration, "thick", true},
	{"no volume gets the number of a device that ended and is published", keepsNumbersApart, "thin", true},
	{"a pod that reads does not change what others read", readersAreApart, "thin", true},
	{"a disk grows while it is written to", growsWhileWritten, "thick", false},
	{"a disk ends where it was promised to", endsAtItsSize, "thick", false},
	{"a thick disk has its space when nothing else is left", keepsItsSpace, "thick", false},
	{"a thin disk takes space as it is written, and gives it back", takesWhatIsWritten, "thin", false},
	{"a thin disk takes writes where it was discarded", takesWritesAfterDiscards, "thin", false},
	{"a disk in use is not deleted", staysWhileUsed, "thick", false},
	{"a device that another program attached counts as use", countsForeignDevices, "thick", true},
	{"an image that was added by hand is a disk", takesImages, "thick", true},
	{"a disk takes writes in any order", takesWritesInAnyOrder, "thick", false},
	{"many disks at once", manyDisks, "thin", false},
}

func TestBlocks(t *testing.T) {
	testenv.NeedPrograms(t, "losetup")
	driver := drivertest.Built(t)
	for n, fs := range filesystems() {
		t.Run(fs.name, func(t *testing.T) {
			mounted := fs.mount(t)
			for _, c := range checks {
				if c.device && n > 0 {
					continue
				}
				t.Run(c.name, func(t *testing.T) {
					h := newHarness(t, driver, fs, mounted, c.allocation)
					c.run(h)
					if !t.Failed() {
						h.removeAll()
					}
				})
			}
		})
	}
}

// A filesystem is what a pool is on.
type filesystem struct {
	name        string
	mount       func(t *testing.T) string
	enforcement string // the pool option of that name
}

const poolBytes = 1 << 30

// filesystems are those that this kernel has.
func filesystems() []filesystem {
	if !testenv.Guest() {
		return []filesystem{
			{"xfs", onLoop("xfs"), "auto"},
			{"ext4", onLoop("ext4"), "auto"},
			{"btrfs enforced", onCountingBtrfs, "required"},
		}
	}
	disk := testenv.GuestDisk
	return []filesystem{
		{"xfs enforced", disk("HOSTPATH_KERNEL_XFS"), "required"},
		{"ext4 enforced", disk("HOSTPATH_KERNEL_EXT4"), "required"},
	}
}

func onLoop(kind string) func(*testing.T) string {
	return func(t *testing.T) string { return testenv.LoopFS(t, kind, poolBytes) }
}

// Its trees are there twice, as mkfs.btrfs has them: with one copy of them a filesystem that others have filled cannot even remove
// a file.
func onCountingBtrfs(t *testing.T) string { return testenv.CountingBtrfs(t, 2*poolBytes, "-m", "dup") }
