package clone_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Files whose ctime is in the future look changed whenever they are compared.
func TestFilesOfTheFuture(t *testing.T) {
	for kind, method := range map[string]clone.Method{"xfs": clone.Share, "ext4": clone.Copy} {
		t.Run(kind, func(t *testing.T) {
			root := testenv.FutureFS(t, kind, 512*mib, func(root string) (files []string) {
				must.Succeed(t, os.Mkdir(filepath.Join(root, "src"), 0o755))
				for _, name := range []string{"future-1", "future-2"} {
					files = append(files, filepath.Join(root, "src", name))
					write(t, files[len(files)-1], "content")
				}
				return files
			})
			src := filepath.Join(root, "src")
			write(t, filepath.Join(src, "other"), "content")
			awaitTick(t, root)
			answers := func(is bool) func() (bool, error) { return func() (bool, error) { return is, nil } }
			copied := func(o clone.Options) (string, clone.Result, error) {
				dst := t.TempDir()
				must.Succeed(t, os.Remove(dst))
				dst = filepath.Join(root, filepath.Base(filepath.Dir(dst))+filepath.Base(dst))
				must.Succeed(t, os.Mkdir(dst, 0o700))
				o.Method, o.Rounds = method, 3
				result, err := clone.Tree(t.Context(), open(t, src), open(t, dst), o)
				return dst, result, err
			}
			dst, _, err := copied(clone.Options{Alone: answers(false)})
			if !errors.Is(err, clone.ErrFuture) || !strings.Contains(err.Error(), filepath.Join(src, "future-")) || !strings.Contains(err.Error(), "2037-01-02T03:04:05Z") {
				t.Errorf("where others may write: %v, want ErrFuture with the file and its ctime", err)
			}
			if left, err := filepath.Glob(filepath.Join(dst, "[a-z]*")); err != nil || len(left) > 0 {
				t.Errorf("%q were copied before that was said, %v", left, err)
			}
			dst, result, err := copied(clone.Options{Alone: answers(true)})
			if err != nil || !result.PointInTime {
				t.Errorf("where no process can write: %+v, %v, want a point in time", result, err)
			}
			clonetest.Same(t, src, dst)
			if _, result, err := copied(clone.Options{}); err != nil || result.PointInTime || result.Changed == 0 {
				t.Errorf("where any copy will do: %+v, %v, want one that is not known to be a point in time", result, err)
			}
			must.Succeed(t, os.Chmod(filepath.Join(src, "future-1"), 0o644))
			awaitTick(t, root)
			if _, result, err := copied(clone.Options{Alone: answers(false)}); result.PointInTime != (method == clone.Share) || errors.Is(err, clone.ErrFuture) == result.PointInTime {
				t.Errorf("with one that may change if its blocks are shared: %+v, %v", result, err)
			}
			must.Succeed(t, os.Chmod(filepath.Join(src, "future-2"), 0o644))
			awaitTick(t, root)
			if _, result, err := copied(clone.Options{Alone: answers(false)}); err != nil || !result.PointInTime {
				t.Errorf("after the modes of both were set again: %+v, %v, want a point in time", result, err)
			}
		})
	}
}
