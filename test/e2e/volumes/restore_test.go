package volumes

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// limitedVariable names a driver, and makes this test binary that, without CAP_SYS_RESOURCE: with it ext4 has no limits.
const limitedVariable = "VOLUMES_LIMITED_DRIVER"

func runLimited() error {
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_RESOURCE, 0, 0, 0); err != nil {
		return err
	}
	driver := os.Getenv(limitedVariable)
	return unix.Exec(driver, append([]string{driver}, os.Args[1:]...), os.Environ())
}

// limited is a program that runs a driver so.
func limited(t *testing.T, driver string) string {
	t.Helper()
	self := must.Value(os.Executable())(t)
	path := filepath.Join(t.TempDir(), "driver")
	script := fmt.Sprintf("#!/bin/sh\n%s=%s exec %s \"$@\"\n", limitedVariable, driver, self)
	must.Succeed(t, os.WriteFile(path, []byte(script), 0o755))
	return path
}

// TestFullVolumeIsRestored restores a volume at its own size that is full, of directories too, and has more files than
// a new volume may have.
func TestFullVolumeIsRestored(t *testing.T) {
	const promise = 16 * mib
	driver := limited(t, drivertest.Built(t))
	for n, fs := range filesystems() {
		t.Run(fmt.Sprint(n, " ", fs.kind), func(t *testing.T) {
			h := newHarness(t, driver, fs, fs.mount(t))
			h.unlimitedInodes()
			h.create("full", promise)
			must.Succeed(t, asUser(func() error { return makeNames(filepath.Join(h.pool, "full"), 1500) }))
			err := asUser(func() error { return h.fillVolume(filepath.Join(h.pool, "full"), 1<<20+100) })
			drivertest.WantErrno(h, "filling the volume", err, fs.full)
			h.Must(h.Process.Close())
			h.Run(h.config("root"))
			h.snapshot("s-full", "full")
			for range 2 { // the second call is a repeated one
				made := must.Value(h.Restore(h.Context(), volume("restored", promise), "s-full@"+drivertest.NodeName))(h)
				if got := made.GetVolume().GetCapacityBytes(); got < promise || got > promise*3/2 {
					h.Errorf("the restored volume has %d bytes, want %d or a little more", got, promise)
				}
			}
			h.ids["restored"] = h.idOf("restored")
			if left, err := os.ReadDir(filepath.Join(h.pool, "restored", "names")); err != nil || len(left) != 1500 {
				h.Errorf("%d of 1500 names were restored, %v", len(left), err)
			}
			h.Logf("limited to %+v", h.limit("restored"))
			h.Must(h.DeleteSnapshot(h.Context(), "s-full@"+drivertest.NodeName))
			h.removeAll()
		})
	}
}

// TestVolumeFullOfFilesIsRestored restores a volume at its own size that has as many files as it may have.
func TestVolumeFullOfFilesIsRestored(t *testing.T) {
	const promise = 2 * mib
	driver := limited(t, drivertest.Built(t))
	for _, fs := range filesystems() {
		if fs.kind == quota.Btrfs {
			continue // it counts no inodes
		}
		t.Run(string(fs.kind), func(t *testing.T) {
			h := newHarness(t, driver, fs, fs.mount(t))
			config := h.config("root")
			config.Pools[0].BytesPerInode = "16384"
			h.Must(h.Process.Close())
			h.Run(config)
			h.create("full", promise)
			most := h.limit("full").Inodes
			h.Must(asUser(func() (err error) {
				for n := range most - 1 {
					err = errors.Join(err, os.WriteFile(filepath.Join(h.pool, "full", fmt.Sprint(n)), nil, 0o600))
				}
				return err
			}))
			h.snapshot("s-full", "full")
			made, err := h.Restore(h.Context(), volume("restored", promise), "s-full@"+drivertest.NodeName)
			h.Must(err)
			h.ids["restored"] = h.idOf("restored")
			left, err := os.ReadDir(filepath.Join(h.pool, "restored"))
			h.Must(err)
			if got := h.limit("restored").Inodes; got != most || int64(len(left)) != most-1 || made.GetVolume().GetCapacityBytes() != promise {
				h.Errorf("the restored volume has %d of %d files, may have %d inodes and not %d, and is %v", len(left), most-1, got, most, made.GetVolume())
			}
			h.Must(h.DeleteSnapshot(h.Context(), "s-full@"+drivertest.NodeName))
			h.removeAll()
		})
	}
}

// makeNames makes files with long names in one directory.
func makeNames(path string, files int) error {
	in := filepath.Join(path, "names")
	if err := os.Mkdir(in, 0o755); err != nil {
		return err
	}
	for n := range files {
		if err := os.WriteFile(filepath.Join(in, fmt.Sprint(n, strings.Repeat("n", 200))), nil, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// unlimitedInodes restarts the driver as one from before inodes were limited.
func (h *harness) unlimitedInodes() {
	h.Helper()
	config := h.config("root")
	config.Pools[0].BytesPerInode = "0"
	h.Must(h.Process.Close())
	h.Run(config)
}
