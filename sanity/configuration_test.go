package sanity

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A configuration is a pool that csi-sanity sees, with a driver of its own.
type configuration struct {
	name   string
	access string // "mount" or "block"
	// enforcement is the pool option of that name.
	enforcement string
	// pool makes the pool's directory.
	pool func(t *testing.T) string
}

// configurations are all that this kernel can have. The host's may lack project
// quotas; the guest of test/cmd/kernel has them on both of its disks.
func configurations() []configuration {
	if testenv.Guest() {
		all := []configuration{
			{"xfs enforced", "mount", "required", onDisk("HOSTPATH_KERNEL_XFS")},
			{"ext4 enforced", "mount", "required", onDisk("HOSTPATH_KERNEL_EXT4")},
			{"xfs enforced", "block", "required", onDisk("HOSTPATH_KERNEL_XFS")},
			{"ext4 enforced", "block", "required", onDisk("HOSTPATH_KERNEL_EXT4")},
		}
		if testing.Short() { // an emulated processor takes a minute for each, and the host has block volumes
			return all[:2]
		}
		return all
	}
	return []configuration{
		{"ext4", "mount", "auto", onLoop("ext4")},
		{"ext4", "block", "auto", onLoop("ext4")},
		{"xfs", "mount", "auto", onLoop("xfs")},
		{"xfs", "block", "auto", onLoop("xfs")},
		{"btrfs", "mount", "auto", onLoop("btrfs")},
		{"btrfs enforced", "mount", "required", onCountingBtrfs},
		{"btrfs enforced", "block", "required", onCountingBtrfs},
	}
}

func onDisk(variable string) func(*testing.T) string {
	return func(t *testing.T) string { return testenv.GuestDir(t, variable) }
}

func onLoop(kind string) func(*testing.T) string {
	return func(t *testing.T) string { return testenv.LoopFS(t, kind, poolBytes) }
}

func onCountingBtrfs(t *testing.T) string { return testenv.CountingBtrfs(t, poolBytes) }
