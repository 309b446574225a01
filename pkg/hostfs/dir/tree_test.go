package dir_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A user can create subvolumes in a volume, and only subvolumes can be moved out of one.
func TestRemoveTree_deepSubvolumes(t *testing.T) {
	testenv.NeedPrograms(t, "btrfs")
	for name, build := range map[string]func(t *testing.T, root *dir.Dir){
		"deep directories in a subvolume": func(t *testing.T, root *dir.Dir) {
			high(t, subvolume(t, child(t, root, "volume"), "sub"), 150)
		},
		"volume is a subvolume, deep subvolume in deep directories": func(t *testing.T, root *dir.Dir) {
			high(t, subvolume(t, high(t, subvolume(t, root, "volume"), 150), "sub"), 150)
		},
		"deep directories in nested subvolumes": func(t *testing.T, root *dir.Dir) {
			at := child(t, root, "volume")
			for _, height := range []int{20, 100, 33, 61, 62, 1, 1, 200} {
				at = high(t, subvolume(t, at, "sub"), height)
			}
		},
		"deeply nested subvolumes": func(t *testing.T, root *dir.Dir) {
			at := child(t, root, "volume")
			for range 150 {
				at = subvolume(t, at, "sub")
			}
		},
		"read-only snapshots in deep directories": func(t *testing.T, root *dir.Dir) {
			volume := child(t, root, "volume")
			origin := subvolume(t, volume, "origin")
			high(t, origin, 100)
			for _, height := range []int{1, 40, 100} {
				top := child(t, volume, fmt.Sprint(height))
				btrfs(t, "snapshot", "-r", origin.String(), high(t, top, height).String()+"/snapshot")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := open(t, testenv.LoopFS(t, "btrfs", 256<<20))
			build(t, root)
			wantRemoved(t, root)
		})
	}
}

// A user can give directories other project ids, inherited by new entries: the kernel refuses to
// move a directory of another project there.
func TestRemoveTree_deepWithManyProjects(t *testing.T) {
	testenv.NeedRoot(t)
	for name, projects := range map[string]int{"two projects": 2, "one project per directory": 200} {
		t.Run(name, func(t *testing.T) {
			root := open(t, testenv.LoopFS(t, "xfs", 300<<20))
			at := child(t, root, "volume")
			const height = 200
			for i := range height {
				giveProject(t, at, uint32(1000+i*projects/height))
				at = high(t, at, 1)
			}
			wantRemoved(t, root)
		})
	}
}

// high makes deeply nested directories and returns the deepest.
func high(t *testing.T, d *dir.Dir, height int) *dir.Dir {
	t.Helper()
	for range height {
		d = child(t, d, "d")
	}
	must.Succeed(t, os.WriteFile(d.HandlePath()+"/file", []byte("content"), 0o600))
	return d
}

func child(t *testing.T, d *dir.Dir, name string) *dir.Dir {
	t.Helper()
	made, err := d.Make(name)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = made.Close() })
	return made
}

func subvolume(t *testing.T, d *dir.Dir, name string) *dir.Dir {
	t.Helper()
	btrfs(t, "create", d.String()+"/"+name)
	made, err := d.Open(name)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = made.Close() })
	return made
}

func btrfs(t *testing.T, arguments ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "btrfs", append([]string{"subvolume"}, arguments...)...).CombinedOutput(); err != nil {
		t.Fatalf("btrfs subvolume %q: %v: %s", arguments, err, out)
	}
}

// giveProject is chattr +P -p. The structure is fsxattr of linux/fs.h.
func giveProject(t *testing.T, d *dir.Dir, project uint32) {
	t.Helper()
	attr := struct {
		flags   uint32
		_       [8]byte
		project uint32
		_       [12]byte
	}{flags: 0x200, project: project} // FS_XFLAG_PROJINHERIT
	const fsSetXattr = 1<<30 | unsafe.Sizeof(attr)<<16 | 'X'<<8 | 32 // FS_IOC_FSSETXATTR
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(d.Fd()), fsSetXattr, uintptr(unsafe.Pointer(&attr))); errno != 0 {
		t.Fatal(errno)
	}
}

// wantRemoved removes the tree named volume, and counts descriptors meanwhile.
func wantRemoved(t *testing.T, root *dir.Dir) {
	t.Helper()
	before, most := descriptors(t), 0
	count := func(ctx context.Context) error {
		most = max(most, descriptors(t))
		return ctx.Err()
	}
	must.Succeed(t, dir.RemoveTree(t.Context(), root, "volume", count))
	if got := entries(t, root); len(got) > 0 {
		t.Errorf("%q remain", got)
	}
	// Two of each directory down to a depth of 64, and one of each that a walk holds.
	if most -= before; most > 200 {
		t.Errorf("%d open descriptors, want at most 200", most)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	must.Succeed(t, err)
	return len(all)
}
