package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A Filesystem is on a Disk.
type Filesystem struct {
	*Disk
	At string // where it is mounted

	backing []string // its directories in sysfs
}

// Mount mounts a new filesystem of a kind that loopfs knows on a disk, until the test ends.
func Mount(t *testing.T, kind string, bytes int64) *Filesystem {
	t.Helper()
	testenv.NeedRoot(t)
	image, err := loopfs.Format(t.Context(), t.TempDir(), kind, bytes)
	must.Succeed(t, err)
	d := New(t, image, t.TempDir())
	must.Succeed(t, os.Remove(image))
	device, err := loopfs.Attach(d.Path)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, device.Close()) })
	must.Succeed(t, unix.IoctlSetInt(int(device.Fd()), unix.LOOP_SET_DIRECT_IO, 1))
	before := backingDevices(t)
	at := filepath.Join(t.TempDir(), "root")
	must.Succeed(t, os.Mkdir(at, 0o755), loopfs.MountDevice(t.Context(), device.Name(), at, kind))
	t.Cleanup(func() {
		d.Heal()
		must.Succeed(t, loopfs.Unmount(at))
	})
	var st unix.Stat_t
	must.Succeed(t, unix.Fstat(int(device.Fd()), &st))
	f := &Filesystem{d, at, []string{fmt.Sprintf("%s/%d:%d", backing, unix.Major(st.Rdev), unix.Minor(st.Rdev))}}
	for _, name := range backingDevices(t) {
		if strings.Contains(name, "btrfs") && !slices.Contains(before, name) { // btrfs makes one of its own
			f.backing = append(f.backing, name)
		}
	}
	return f
}

const backing = "/sys/class/bdi"

func backingDevices(t *testing.T) []string {
	t.Helper()
	names, err := filepath.Glob(backing + "/*")
	must.Succeed(t, err)
	return names
}

// KeepUnwritten has the kernel keep about so many bytes in memory of what is still to be written: who writes more waits, as where the memory of
// a node is full of that.
func (f *Filesystem) KeepUnwritten(t *testing.T, bytes int) {
	t.Helper()
	for _, name := range f.backing {
		for file, value := range map[string]int{"max_bytes": bytes, "strict_limit": 1} {
			err := os.WriteFile(filepath.Join(name, file), []byte(fmt.Sprint(value)), 0)
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.EROFS) {
				testenv.Missing(t, name+"/"+file+" of Linux 6.2")
			}
			must.Succeed(t, err)
		}
	}
}
