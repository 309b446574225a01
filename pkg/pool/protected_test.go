package pool_test

import (
	"os"
	"os/exec"
	"testing"
	"testing/synctest"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// What a pod sets on the root of its volume, and on a file in it, does not keep the volume from being deleted and
// erased. The owner of a directory makes a subvolume read-only, the others take CAP_LINUX_IMMUTABLE.
func TestDeleteRemovesProtectedVolume(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "chattr", "btrfs")
	for _, tt := range []struct{ fs, flags string }{
		{"xfs", "+i"}, {"xfs", "+a"}, {"ext4", "+i"}, {"ext4", "+a"}, {"btrfs", "+i"}, {"btrfs", "+a"}, {"btrfs", "ro"}, {"btrfs", "ro+i"},
	} {
		t.Run(tt.fs+" "+tt.flags, func(t *testing.T) {
			root := testenv.LoopFS(t, tt.fs, 512*mib)
			if tt.fs == "btrfs" {
				command(t, "btrfs", "quota", "enable", root)
			}
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, root)
				b.real = quota.Detect
				b.start(local)
				b.create("pvc-1", 16*mib)
				volume := b.Path("pool", "pvc-1")
				must.Succeed(t, os.WriteFile(volume+"/file", nil, 0o600))
				if flag := tt.flags[len(tt.flags)-2:]; flag != "ro" {
					command(t, "chattr", flag, volume+"/file", volume)
				}
				if tt.flags[0] == 'r' {
					command(t, "btrfs", "property", "set", volume, "ro", "true")
				}
				b.delete("pvc-1")
				b.wantVolumes()
				b.wantClean()
			})
		})
	}
}

func command(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v: %s", name, args, err, out)
	}
}
