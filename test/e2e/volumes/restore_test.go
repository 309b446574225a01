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
	"kubevirt.io/hostpath-provisioner/test/testenv"
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
	self, err := os.Executable()
	must.Succeed(t, err)
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
	all := filesystems()
	if !testenv.Guest() {
		all = append(all, filledFilesystems()["btrfs with simple quotas"])
	}
	for n, fs := range all {
		t.Run(fmt.Sprint(n, " ", fs.kind), func(t *testing.T) {
			b := newBench(t, driver, fs, fs.mount(t))
			b.unlimitedInodes()
			b.create("full", promise)
			must.Succeed(t, asUser(func() error { return makeNames(filepath.Join(b.pool, "full"), 1500) }))
			err := asUser(func() error { return b.fillVolume(filepath.Join(b.pool, "full"), 1<<20+100) })
			drivertest.WantErrno(b, "filling the volume", err, fs.full)
			b.Must(b.Process.Close())
			b.Run(b.config("root"))
			b.snapshot("s-full", "full")
			for range 2 { // the second call is a repeated one
				made, err := b.Restore(b.Context(), volume("restored", promise), "s-full@"+drivertest.NodeName)
				b.Must(err)
				if got := made.GetVolume().GetCapacityBytes(); got < promise || got > promise*3/2 {
					b.Errorf("the restored volume has %d bytes, want %d or a little more", got, promise)
				}
			}
			b.ids["restored"] = b.idOf("restored")
			if left, err := os.ReadDir(filepath.Join(b.pool, "restored", "names")); err != nil || len(left) != 1500 {
				b.Errorf("%d of 1500 names were restored, %v", len(left), err)
			}
			b.Logf("limited to %+v", b.limit("restored"))
			b.Must(b.DeleteSnapshot(b.Context(), "s-full@"+drivertest.NodeName))
			b.removeAll()
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
			b := newBench(t, driver, fs, fs.mount(t))
			config := b.config("root")
			config.Pools[0].BytesPerInode = "16384"
			b.Must(b.Process.Close())
			b.Run(config)
			b.create("full", promise)
			most := b.limit("full").Inodes
			b.Must(asUser(func() (err error) {
				for n := range most - 1 {
					err = errors.Join(err, os.WriteFile(filepath.Join(b.pool, "full", fmt.Sprint(n)), nil, 0o600))
				}
				return err
			}))
			b.snapshot("s-full", "full")
			made, err := b.Restore(b.Context(), volume("restored", promise), "s-full@"+drivertest.NodeName)
			b.Must(err)
			b.ids["restored"] = b.idOf("restored")
			left, err := os.ReadDir(filepath.Join(b.pool, "restored"))
			b.Must(err)
			if got := b.limit("restored").Inodes; got != most || int64(len(left)) != most-1 || made.GetVolume().GetCapacityBytes() != promise {
				b.Errorf("the restored volume has %d of %d files, may have %d inodes and not %d, and is %v", len(left), most-1, got, most, made.GetVolume())
			}
			b.Must(b.DeleteSnapshot(b.Context(), "s-full@"+drivertest.NodeName))
			b.removeAll()
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
func (b *bench) unlimitedInodes() {
	b.Helper()
	config := b.config("root")
	config.Pools[0].BytesPerInode = "0"
	b.Must(b.Process.Close())
	b.Run(config)
}
