package pool_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
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
			withQuotas(t, root, local, func(t *testing.T, h *harness) {
				h.create("pvc-1", 16*mib)
				volume := h.Path("pool", "pvc-1")
				must.Succeed(t, os.WriteFile(volume+"/file", nil, 0o600))
				if flag := tt.flags[len(tt.flags)-2:]; flag != "ro" {
					command(t, "chattr", flag, volume+"/file", volume)
				}
				if tt.flags[0] == 'r' {
					command(t, "btrfs", "property", "set", volume, "ro", "true")
				}
				h.delete("pvc-1")
				h.wantVolumes()
				h.wantClean()
			})
		})
	}
}

// On btrfs taking the flags off the root of a volume is charged to its limit, at which it may be, also where the driver takes quotas for none.
func TestDeleteRemovesFullProtectedVolume(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "chattr", "btrfs")
	for name, lose := range map[string]func(t *testing.T, root, volume string){
		"enforced":     func(*testing.T, string, string) {},
		"inconsistent": func(t *testing.T, root, _ string) { loseCount(t, root) },
		"simple": func(t *testing.T, root, volume string) {
			countSimply(t, root)
			group(t, root, volume)
		},
	} {
		for _, readOnly := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s read-only %v", name, readOnly), func(t *testing.T) {
				root := testenv.CountingBtrfs(t, 512*mib)
				withQuotas(t, root, local, func(t *testing.T, h *harness) {
					h.create("pvc-1", 16*mib)
					volume := h.Path("pool", "pvc-1")
					lose(t, root, volume)
					must.Succeed(t, os.Mkdir(volume+"/full", 0o700))
					command(t, "chattr", "+i", volume)
					fillToLimit(t, volume+"/full")
					if readOnly {
						command(t, "btrfs", "property", "set", volume, "ro", "true")
					}
					h.restart(local)
					h.delete("pvc-1")
					h.wantVolumes()
					h.wantClean()
				})
			})
		}
	}
}

// A full volume with a protected root is copied, and what an attempt has left that was interrupted before it took off the flags does
// not stay.
func TestSnapshotOfFullProtectedVolume(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "chattr", "btrfs")
	root := testenv.CountingBtrfs(t, 512*mib)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("pvc-1", 16*mib)
		volume := h.Path("pool", "pvc-1")
		must.Succeed(t, os.Mkdir(volume+"/full", 0o700))
		command(t, "chattr", "+i", volume)
		fillToLimit(t, volume+"/full")
		syncfs(t, root)
		snapshot := func() error {
			return must.Err(h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s-1"), Source: id(t, "pvc-1")}))
		}
		for range 2 {
			must.Succeed(t, snapshot(), h.Snapshots().Delete(t.Context(), snapshotID(t, "s-1")))
			h.wantClean()
			command(t, "btrfs", "subvolume", "snapshot", volume, h.Own("creating", "node-1", "~s-1"))
		}
	})
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

// A process that makes a subvolume in a volume needs no privilege to give it a limit (BTRFS_SUBVOL_QGROUP_INHERIT). It does not keep the
// volume from being erased: a full subvolume is made writable, and others in it are removed. The kernel keeps limits also where the driver
// takes quotas for none: simple ones, and those that count nothing any more.
func TestDeleteRemovesFullSubvolumesInVolume(t *testing.T) {
	testenv.NeedRoot(t)
	for name, c := range map[string]struct {
		before, after func(t *testing.T, root string)
	}{
		"enforced":     {},
		"simple":       {before: countSimply},
		"inconsistent": {after: loseCount},
	} {
		t.Run(name, func(t *testing.T) {
			root := testenv.CountingBtrfs(t, 512*mib)
			if c.before != nil {
				c.before(t, root)
			}
			withQuotas(t, root, local, func(t *testing.T, h *harness) {
				h.create("pvc-1", 16*mib)
				volume := h.Path("pool", "pvc-1")
				makeSubvolume(t, volume, "full", "", mib)
				makeSubvolume(t, volume+"/full", "inside", "", 16*mib)
				must.Succeed(t, os.WriteFile(volume+"/full/inside/data", make([]byte, 8*mib), 0o600))
				fillToLimit(t, volume+"/full")
				syncfs(t, root)
				makeSubvolume(t, volume, "read-only", volume+"/full", 1) // it has the limit of its source
				if c.after != nil {
					c.after(t, root)
				}
				h.restart(local)
				if enforced := h.Status()[0].Enforced; enforced != (name == "enforced") {
					t.Errorf("enforced: %v", enforced)
				}
				h.delete("pvc-1")
				h.wantVolumes()
				h.wantClean()
			})
		})
	}
}

// loseCount has the kernel take the count of quotas for wrong, by changing what groups contain.
func loseCount(t *testing.T, root string) {
	t.Helper()
	command(t, "sh", "-ec", `btrfs subvolume create "$0/a"; head -c 5M /dev/zero >"$0/a/x"; sync -f "$0"; btrfs subvolume snapshot "$0/a" "$0/b"
btrfs qgroup create 1/5 "$0"; btrfs qgroup assign --no-rescan "0/$(btrfs inspect-internal rootid "$0/a")" 1/5 "$0"; sync -f "$0"`, root)
}

// makeSubvolume makes a subvolume, or a read-only snapshot of one, that has a limit in bytes.
func makeSubvolume(t *testing.T, in, name, of string, limit uint64) {
	t.Helper()
	// struct btrfs_qgroup_inherit of linux/btrfs.h with BTRFS_QGROUP_INHERIT_SET_LIMITS and BTRFS_QGROUP_LIMIT_MAX_RFER.
	inherit := [9]uint64{0: 1, 4: 1, 5: limit}
	args := struct { // struct btrfs_ioctl_vol_args_v2
		Source, _, Flags uint64
		Size             uint64
		Inherit          unsafe.Pointer
		_                [2]uint64
		Name             [4040]byte
	}{Flags: 1 << 2, Size: uint64(unsafe.Sizeof(inherit)), Inherit: unsafe.Pointer(&inherit)}
	copy(args.Name[:], name)
	number := uintptr(1<<30 | 4096<<16 | 0x94<<8 | 24) // BTRFS_IOC_SUBVOL_CREATE_V2
	if of != "" {
		source := must.Value(os.Open(of))(t)
		defer func() { must.Succeed(t, source.Close()) }()
		args.Source, args.Flags = uint64(source.Fd()), args.Flags|1<<1
		number-- // BTRFS_IOC_SNAP_CREATE_V2
	}
	to := must.Value(os.Open(in))(t)
	defer func() { must.Succeed(t, to.Close()) }()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, to.Fd(), number, uintptr(unsafe.Pointer(&args))); errno != 0 {
		t.Fatal(errno)
	}
}
