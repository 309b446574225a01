// Package volumes tests that the kernel keeps what the driver promises: volumes of
// the real program, on the filesystems that can limit them. On the host that is
// btrfs. In the guest of test/cmd/kernel it is XFS and ext4, and there SELinux keeps
// containers apart.
package volumes

import (
	"log"
	"os"
	"slices"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) {
	if os.Getenv(writerVariable) != "" {
		os.Exit(runWriter())
	}
	if os.Getenv(limitedVariable) != "" {
		log.Fatal(runLimited())
	}
	testenv.Main(m)
}

// short is a size, or a quarter of it where an emulated processor would take minutes for what proves the same.
func short(bytes int64) int64 {
	if testing.Short() && testenv.Guest() {
		return bytes / 4
	}
	return bytes
}

// A check has a driver of its own, on an empty pool.
type check struct {
	name string
	run  func(b *harness)
}

var checks = []check{
	{"a volume holds what was promised and not a byte more", holdsItsPromise},
	{"a volume grows while it is written to", growsWhileWritten},
	{"a limit that was changed is put back at the start", limitsArePutBack},
	{"many volumes and a crash", manyVolumes},
}

// ofXFS are the checks of what only XFS does.
var ofXFS = []check{
	{"empty files take no more of the disk than is set aside for them", inodesAreBounded},
	{"a full volume can be overwritten after a snapshot", overwritesSharedBlocks},
	{"a disk that shares its blocks takes writes at random", writesAtRandomWhileSharing},
	{"a full directory that shares its blocks takes writes at random", writesAtRandomInSharingDirectory},
	{"a volume full of a file that changes can be copied", snapshotsWhileFileChanges},
}

// confinement are the checks that need SELinux.
var confinement = []check{
	{"a container may write to its volume and to nothing else of the pool", containersAreConfined},
	{"pods with different labels use volumes of one pool at once", podsOfOnePool},
	{"a volume that came with another label is relabelled once", migratedIsRelabelled},
}

func TestVolumes(t *testing.T) {
	driver := drivertest.Built(t)
	if testenv.Guest() {
		testenv.GuestVariable(t, "HOSTPATH_KERNEL_SELINUX")
	}
	for n, fs := range filesystems() {
		t.Run(string(fs.kind), func(t *testing.T) {
			mounted := fs.mount(t)
			here := slices.Clone(checks)
			if fs.kind == quota.XFS {
				here = append(here, ofXFS...)
			}
			if testenv.Guest() && (n == 0 || !testing.Short()) { // the kernel asks no filesystem whether a container may
				here = append(here, confinement...)
			}
			for _, c := range here {
				t.Run(c.name, func(t *testing.T) {
					h := newHarness(t, driver, fs, mounted)
					c.run(h)
					if !t.Failed() {
						h.removeAll()
					}
				})
			}
		})
	}
}
