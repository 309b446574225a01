package clone_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A file that is removed and made again can be listed twice in a pass: XFS puts it at another place of its directory.
func TestEntryThatIsListedTwice(t *testing.T) {
	for kind, makeEntry := range map[string]func(path string) error{
		"file":      func(path string) error { return os.WriteFile(path, []byte(path), 0o600) },
		"directory": func(path string) error { return os.MkdirAll(filepath.Join(path, "below"), 0o700) },
		"link":      func(path string) error { return os.Symlink("target", path) },
		"two names": func(path string) error {
			_ = os.Remove(path + "-too")
			if err := os.WriteFile(path, []byte(path), 0o600); err != nil {
				return err
			}
			return os.Link(path, path+"-too")
		},
	} {
		t.Run(kind, func(t *testing.T) {
			onEach(t, filesystems[:1], func(t *testing.T, src, dst string, method clone.Method) {
				name := func(n int) string { return filepath.Join(src, fmt.Sprintf("%0100d", n)) }
				for n := range 200 {
					must.Succeed(t, makeEntry(name(n)))
				}
				again := sync.OnceFunc(func() {
					must.Succeed(t, os.RemoveAll(name(0)))
					write(t, filepath.Join(src, fmt.Sprintf("%0100d", 1000)), "takes its place")
					must.Succeed(t, makeEntry(name(0)))
				})
				result := tree(t, src, dst, clone.Options{Method: method, Rounds: 3, Pause: func(context.Context) error {
					if _, err := os.Lstat(filepath.Join(dst, filepath.Base(name(0)))); err == nil {
						again()
					}
					return nil
				}})
				if !result.PointInTime {
					t.Errorf("it is %+v", result)
				}
				clonetest.Same(t, src, dst)
			})
		})
	}
}
