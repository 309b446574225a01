package clone_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// What is mounted in the source is not copied in the place of what is below, and nothing is called a copy that lacks that.
func TestMountsInTheSource(t *testing.T) {
	onEach(t, filesystems, func(t *testing.T, src, dst string, method clone.Method) {
		other := t.TempDir()
		write(t, filepath.Join(other, "file"), "another")
		must.Succeed(t, os.Mkdir(filepath.Join(src, "sub"), 0o750))
		write(t, filepath.Join(src, "sub", "file"), "content")
		for _, entry := range []string{"sub", "sub/file"} {
			at := filepath.Join(src, entry)
			must.Succeed(t, unix.Mount(filepath.Join(other, entry[len("sub"):]), at, "", unix.MS_BIND, ""))
			for rounds := range 2 {
				_, err := clone.Tree(t.Context(), open(t, src), open(t, dst), clone.Options{Method: method, Rounds: rounds})
				must.ErrorIs(t, err, clone.ErrMounted)
				must.Succeed(t, os.RemoveAll(dst), os.Mkdir(dst, 0o700))
			}
			must.Succeed(t, unix.Unmount(at, 0))
		}
	})
}
