package pool_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
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

// On btrfs taking the flags off the root of a volume is charged to its limit, at which it may be.
func TestDeleteRemovesFullProtectedVolume(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "chattr", "btrfs")
	for name, mount := range map[string]func(testing.TB, int64, ...string) string{
		"ordinary quotas": testenv.CountingBtrfs, "simple quotas": testenv.SimpleBtrfs,
	} {
		for _, readOnly := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, read-only %v", name, readOnly), func(t *testing.T) {
				root := mount(t, 512*mib)
				synctest.Test(t, func(t *testing.T) {
					b := newBench(t, root)
					b.real = quota.Detect
					b.start(local)
					b.create("pvc-1", 16*mib)
					volume := b.Path("pool", "pvc-1")
					must.Succeed(t, os.Mkdir(volume+"/full", 0o700))
					command(t, "chattr", "+i", volume)
					fillToLimit(t, volume+"/full")
					if readOnly {
						command(t, "btrfs", "property", "set", volume, "ro", "true")
					}
					b.delete("pvc-1")
					b.wantVolumes()
					b.wantClean()
				})
			})
		}
	}
}

// fillToLimit makes smaller and smaller files in a directory until none is accepted.
func fillToLimit(t *testing.T, in string) {
	t.Helper()
	for _, size := range []int{mib, 4096, 100, 0} {
		for n, refused := 0, 0; refused < 3; n++ {
			err := os.WriteFile(fmt.Sprintf("%s/%d-%d", in, size, n), make([]byte, size), 0o600)
			if err == nil {
				continue
			}
			if refused++; !errors.Is(err, syscall.EDQUOT) {
				t.Fatal(err)
			}
			syncfs(t, in)
		}
	}
}

func command(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v: %s", name, args, err, out)
	}
}
