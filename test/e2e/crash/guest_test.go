package crash

import (
	"os"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// guest reports whether this is the guest of test/cmd/kernel.
func guest() bool { return os.Getenv("HOSTPATH_KERNEL") != "" }

// onDisk is where the guest has mounted one of its disks.
func onDisk(variable string) func(*testing.T) string {
	return func(t *testing.T) string {
		t.Helper()
		path := os.Getenv(variable)
		if path == "" {
			t.Fatalf("$HOSTPATH_KERNEL is set, but $%s is not", variable)
		}
		return path
	}
}

// countingBtrfs switches quotas on and waits until all that is there is counted.
func countingBtrfs(t *testing.T) string {
	t.Helper()
	testenv.NeedPrograms(t, "btrfs")
	path := testenv.LoopFS(t, "btrfs", 1<<30)
	enableQuotas(t, path)
	return path
}

func enableQuotas(t *testing.T, path string) {
	t.Helper()
	run(t, "btrfs", "quota", "enable", path)
	run(t, "btrfs", "quota", "rescan", "-w", path)
}
