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

// Mounted mounts a new filesystem of a kind that loopfs knows on a disk, until the test ends. The kernel keeps about so many bytes in
// memory of what is still to be written to it: who writes more waits, as where the memory of a node is full of that.
func Mounted(t *testing.T, kind string, bytes int64, unwritten int) (root string, d *Disk) {
	t.Helper()
	testenv.NeedRoot(t)
	image, err := loopfs.Format(t.Context(), t.TempDir(), kind, bytes)
	must.Succeed(t, err)
	d = New(t, image, t.TempDir())
	must.Succeed(t, os.Remove(image))
	device, err := loopfs.Attach(d.Path)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, device.Close()) })
	must.Succeed(t, unix.IoctlSetInt(int(device.Fd()), unix.LOOP_SET_DIRECT_IO, 1))
	before := backingDevices(t)
	root = filepath.Join(t.TempDir(), "root")
	must.Succeed(t, os.Mkdir(root, 0o755), loopfs.MountDevice(t.Context(), device.Name(), root, kind))
	t.Cleanup(func() {
		d.Heal()
		must.Succeed(t, loopfs.Unmount(root))
	})
	limitUnwritten(t, device, before, unwritten)
	return root, d
}

const backing = "/sys/class/bdi"

func backingDevices(t *testing.T) []string {
	t.Helper()
	names, err := filepath.Glob(backing + "/*")
	must.Succeed(t, err)
	return names
}

// limitUnwritten sets how much is kept of what was written to the filesystem that has been mounted, by the device that it is on or, on
// btrfs, by one that it has made.
func limitUnwritten(t *testing.T, device *os.File, before []string, bytes int) {
	t.Helper()
	var st unix.Stat_t
	must.Succeed(t, unix.Fstat(int(device.Fd()), &st))
	of := []string{fmt.Sprintf("%s/%d:%d", backing, unix.Major(st.Rdev), unix.Minor(st.Rdev))}
	for _, name := range backingDevices(t) {
		if strings.Contains(name, "btrfs") && !slices.Contains(before, name) {
			of = append(of, name)
		}
	}
	for _, name := range of {
		for file, value := range map[string]int{"max_bytes": bytes, "strict_limit": 1} {
			err := os.WriteFile(filepath.Join(name, file), []byte(fmt.Sprint(value)), 0)
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.EROFS) {
				testenv.Missing(t, name+"/"+file+" of Linux 6.2")
			}
			must.Succeed(t, err)
		}
	}
}
