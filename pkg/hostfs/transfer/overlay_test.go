package transfer_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A store through a mapping shows by the ctime of a file only if the page was written to the disk since the last one. What writes the pages of
// one file on other filesystems writes none on an overlayfs.
func TestStoresThroughMappings(t *testing.T) {
	for kind, mount := range map[string]func(t *testing.T) string{
		"ext4":      func(t *testing.T) string { t.Helper(); return testenv.LoopFS(t, "ext4", 512*mib) },
		"overlayfs": func(t *testing.T) string { t.Helper(); return testenv.Overlay(t, "ext4", 512*mib) },
	} {
		t.Run(kind, func(t *testing.T) {
			root := mount(t)
			src, dst := filepath.Join(root, "src"), filepath.Join(testenv.LoopFS(t, "ext4", 512*mib), "dst") // not on what would be synced with it
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
			write(t, filepath.Join(src, "mapped"), strings.Repeat("0", 4096))
			f, err := os.OpenFile(filepath.Join(src, "mapped"), os.O_RDWR, 0)
			must.Succeed(t, err)
			page, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			must.Succeed(t, err, f.Close())
			c := connect(t, dst, transfer.Options{})
			first := c.pass(src, transfer.Pass{})
			page[0] = '1'
			awaitSettled(t, src)
			second := c.pass(src, transfer.Pass{Since: first.Began})
			page[0] = '2'
			must.Succeed(t, unix.Munmap(page)) // the process has ended
			c.pass(src, transfer.Pass{Since: second.Began, Still: true, Verify: transfer.VerifyChanged})
			c.finish()
			clonetest.Same(t, src, dst)
		})
	}
}
