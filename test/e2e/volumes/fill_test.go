package volumes

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// fillers are the files that volumes are filled with, by their bytes: what btrfs has in its trees, what takes a block,
// and large ones.
var fillers = map[string]int{"tiny files": 2000, "small files": 4 << 10, "large files": 8 << 20}

// shortOrder is in what order make test fills a filesystem; other orders, and those that are not named, are left to make test-hard.
var shortOrder = map[string]string{
	"btrfs":                 "large files last",
	"btrfs with a reserve":  "large files first",
	"btrfs with trees once": "large files first",
	"xfs":                   "large files last",
	"ext4":                  "large files last",
}

// TestFilledPool promises all of a pool to volumes, and fills them to their sizes with small and large files, in one
// order and the other. Each is refused by its limit, and none by the end of the disk.
func TestFilledPool(t *testing.T) {
	driver := drivertest.Built(t)
	orders := map[string][]string{
		"large files first": {"large files", "small files", "tiny files"},
		"large files last":  {"tiny files", "small files", "large files"},
	}
	for name, filled := range filledFilesystems() {
		for order, volumes := range orders {
			if testing.Short() && shortOrder[name] != order {
				continue
			}
			t.Run(name+", "+order, func(t *testing.T) {
				h := newHarness(t, driver, filled, filled.mount(t))
				h.fillPool(volumes)
				h.removeAll()
			})
		}
	}
}

func filledFilesystems() map[string]filesystem {
	size := int64(5 << 29)
	switch {
	case testing.Short():
		size = 512 * mib
	case testenv.Guest(): // whose memory has the disk
		size = 1 << 30
	}
	// What was overwritten since the last commit takes space too, and most of it in a small one.
	mixed := max(size, 1<<30)
	on := func(mount func(t testing.TB, bytes int64, arguments ...string) string, arguments ...string) filesystem {
		return filesystem{kind: quota.Btrfs, full: syscall.EDQUOT, mount: func(t *testing.T) string { return mount(t, size, arguments...) }}
	}
	reserving := on(testenv.CountingBtrfs, "-m", "dup")
	reserving.reserve = "4%"
	if !testenv.Guest() {
		return map[string]filesystem{
			"btrfs":                 on(testenv.CountingBtrfs, "-m", "dup"),
			"btrfs with a reserve":  reserving,
			"btrfs with trees once": on(testenv.CountingBtrfs),
			"mixed btrfs":           {kind: quota.Btrfs, full: syscall.EDQUOT, mount: func(t *testing.T) string { return testenv.CountingBtrfs(t, mixed, "--mixed") }},
		}
	}
	if testing.Short() { // make test has btrfs on the host
		return madeFilesystems(64*mib, 300*mib)
	}
	all := map[string]filesystem{"btrfs": on(testenv.CountingBtrfs, "-m", "dup"), "btrfs with a reserve": reserving}
	maps.Copy(all, madeFilesystems(size/2, size))
	return all
}

// madeFilesystems are smaller than those of the guest, whose emulated processor fills and empties them in seconds, or, of 1 GiB, in minutes.
func madeFilesystems(ext4, xfs int64) map[string]filesystem {
	all := make(map[string]filesystem)
	for _, fs := range filesystems() {
		mount := func(t *testing.T) string {
			t.Helper()
			// With an inode for each small file: by default there is one for four blocks, which volumes share.
			return testenv.MountMade(t, "ext4", ext4, []string{"-i", "4096", "-O", "quota,project", "-E", "quotatype=prjquota"}, "prjquota")
		}
		if fs.kind == quota.XFS {
			mount = func(t *testing.T) string { t.Helper(); return testenv.LoopFS(t, "xfs", xfs, "prjquota") }
		}
		fs.mount = mount
		all[string(fs.kind)] = fs
	}
	return all
}

// fillPool makes volumes of all that the pool has to offer, and fills them in this order.
func (h *harness) fillPool(volumes []string) {
	h.Helper()
	sizes := make(map[string]int64)
	for n, what := range volumes {
		name := strings.ReplaceAll("pvc-"+what, " ", "-")
		sizes[name] = h.MustCapacity("local") / int64(len(volumes)-n) / mib * mib
		if testenv.Guest() && testing.Short() && n < len(volumes)-1 {
			sizes[name] = 2 * mib
		}
		h.create(name, sizes[name])
	}
	if left := h.MustCapacity("local"); left > 64*mib {
		h.Errorf("%d MiB are not promised", left/mib)
	}
	for _, what := range volumes {
		name := strings.ReplaceAll("pvc-"+what, " ", "-")
		err := asUser(func() error { return h.fillVolume(filepath.Join(h.pool, name), fillers[what]) })
		used := h.used(name)
		h.Logf("%s: %d of %d MiB, %d of %d files: %v", name, used.Bytes/mib, sizes[name]/mib, used.Inodes, used.Limit.Inodes, err)
		if !errors.Is(err, h.fs.full) {
			h.Errorf("filling a volume with %s: %v, want %v", what, err, h.fs.full)
		}
		if used.Bytes < sizes[name]*9/10 && (used.Limit.Inodes == 0 || used.Inodes < used.Limit.Inodes) {
			h.Errorf("%d of %d bytes were written as %s, in %d of %d files", used.Bytes, sizes[name], what, used.Inodes, used.Limit.Inodes)
		}
	}
}

// fillVolume makes files of so many bytes until it is refused, also after what was written is on the disk.
func (h *harness) fillVolume(path string, bytes int) error {
	content := make([]byte, bytes)
	for refused, n := 0, 0; ; n++ {
		in := filepath.Join(path, fmt.Sprint(n/1000))
		err := os.Mkdir(in, 0o755)
		if err == nil || errors.Is(err, fs.ErrExist) {
			err = os.WriteFile(filepath.Join(in, fmt.Sprintf("%d-%s", n, strings.Repeat("n", 100))), content, 0o600)
		}
		if err == nil {
			continue
		}
		if refused++; refused == 3 || !errors.Is(err, h.fs.full) {
			return err
		}
		h.settle()
	}
}

func (h *harness) used(name string) quota.Usage {
	h.Helper()
	h.settle()
	d := h.open(name)
	defer func() { must.Succeed(h, d.Close()) }()
	return must.Value(h.facility.Usage(d, h.ids[name]))(h)
}

// asUser calls without CAP_SYS_RESOURCE, with which ext4 has no limits.
func asUser(call func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // which ends with the goroutine, and its capabilities with it
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var sets [2]unix.CapUserData
		err := unix.Capget(&header, &sets[0])
		sets[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
		if err == nil {
			err = unix.Capset(&header, &sets[0])
		}
		if err == nil {
			err = call()
		}
		done <- err
	}()
	return <-done
}
