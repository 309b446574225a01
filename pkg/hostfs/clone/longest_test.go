package clone_test

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A file may be as long as numbers go, and have content at its end.
func TestLongestFile(t *testing.T) {
	root := testenv.LoopFS(t, "xfs", 512*mib)
	from := must.Value(os.Create(filepath.Join(root, "from")))(t)
	defer func() { must.Succeed(t, from.Close()) }()
	const content = "content"
	must.Succeed(t, from.Truncate(math.MaxInt64))
	_, err := from.WriteAt([]byte(content), math.MaxInt64-int64(len(content)))
	must.Succeed(t, err)
	for _, method := range []clone.Method{clone.Copy, clone.Share} {
		to := must.Value(os.Create(filepath.Join(root, "to")))(t)
		must.Succeed(t, clone.File(t.Context(), to, from, method))
		is := make([]byte, len(content))
		_, err := unix.Pread(int(to.Fd()), is, math.MaxInt64-int64(len(content)))
		must.Succeed(t, err, to.Close())
		if string(is) != content {
			t.Errorf("method %v: the copy ends with %q", method, is)
		}
	}
}
