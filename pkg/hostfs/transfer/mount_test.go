package transfer_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// What is mounted in the source stays out. What is below cannot be seen, and a copy without it is not the volume.
func TestMountsInTheSource(t *testing.T) {
	tests := map[string]func(t *testing.T, src string) string{
		"over a directory": func(t *testing.T, src string) string {
			at := filepath.Join(src, "sub")
			must.Succeed(t, os.Mkdir(at, 0o750))
			write(t, filepath.Join(at, "hidden"), "content")
			must.Succeed(t, unix.Mount("other", at, "tmpfs", 0, ""))
			return at
		},
		"over a file, of another of the tree": func(t *testing.T, src string) string {
			at, other := filepath.Join(src, "file"), filepath.Join(src, "other")
			write(t, at, "content")
			write(t, other, "another")
			must.Succeed(t, unix.Mount(other, at, "", unix.MS_BIND, ""))
			return at
		},
		"over a file": func(t *testing.T, src string) string {
			at, other := filepath.Join(src, "file"), filepath.Join(t.TempDir(), "other")
			write(t, at, "content")
			write(t, other, "another")
			must.Succeed(t, unix.Mount(other, at, "", unix.MS_BIND, ""))
			return at
		},
	}
	for name, mount := range tests {
		t.Run(name, func(t *testing.T) {
			src, dst := onXFS(t)
			at := mount(t, src)
			t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
			c := connect(t, dst, transfer.Options{})
			c.pass(src, transfer.Pass{})
			if found := must.Value(filepath.Glob(filepath.Join(dst, filepath.Base(at))))(t); len(found) > 0 {
				t.Errorf("%s was sent", found)
			}
			_, err := c.Pass(t.Context(), open(t, src), whole)
			must.ErrorIs(t, err, clone.ErrMounted)
			must.Succeed(t, unix.Unmount(at, unix.MNT_DETACH))
			c.pass(src, whole)
			c.finish()
			clonetest.Same(t, src, dst)
		})
	}
}
