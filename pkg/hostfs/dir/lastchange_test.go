package dir_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestLastChange(t *testing.T) {
	root := t.TempDir()
	must.Succeed(t, os.MkdirAll(filepath.Join(root, "tree", "a", "b", "c"), 0o755))
	must.Succeed(t, os.MkdirAll(filepath.Join(root, "tree", "other"), 0o755))
	must.Succeed(t, os.Symlink("/", filepath.Join(root, "tree", "link")))
	ctime := func(path string) time.Time {
		var st unix.Stat_t
		must.Succeed(t, unix.Lstat(path, &st))
		return time.Unix(st.Ctim.Unix())
	}
	// Each level is entered when all else in it is done, as a copy does.
	var last string
	for _, path := range []string{"tree/other", "tree/a", "tree/a/b", "tree/a/b/c", "tree/a/b/c/file"} {
		last = filepath.Join(root, path)
		for before := ctime(root); ; {
			if path == "tree/a/b/c/file" {
				must.Succeed(t, os.WriteFile(last, []byte("x"), 0o644))
			} else {
				must.Succeed(t, os.Chmod(last, 0o700))
				must.Succeed(t, os.Chmod(last, 0o755))
			}
			if ctime(last).After(before) {
				break
			}
		}
		must.Succeed(t, os.Chmod(root, 0o700))
		must.Succeed(t, os.Chmod(root, 0o755))
	}
	d, err := dir.Open(root)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	steps := 0
	got, err := dir.LastChange(t.Context(), d, "tree", func() { steps++ })
	must.Succeed(t, err)
	if want := ctime(last); !got.Equal(want) {
		t.Errorf("the tree changed last at %v, want %v", got, want)
	}
	if steps == 0 {
		t.Error("no step was counted")
	}
	if _, err := dir.LastChange(t.Context(), d, "missing", func() {}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing name: %v", err)
	}
	tree, err := d.Open("tree")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, tree.Close()) }()
	if got, err := dir.LastChange(t.Context(), tree, "link", func() {}); err != nil || !got.Equal(ctime(filepath.Join(root, "tree", "link"))) {
		t.Errorf("a link changed last at %v (%v), want its own change", got, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := dir.LastChange(ctx, d, "tree", func() {}); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the context: %v", err)
	}
}
