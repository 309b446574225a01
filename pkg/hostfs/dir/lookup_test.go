package dir_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Absolute links are those of the root that is given, and lead nowhere else.
func TestLookup(t *testing.T) {
	at := t.TempDir()
	must.Succeed(t, os.MkdirAll(filepath.Join(at, "a/b"), 0o700))
	must.Succeed(t, os.WriteFile(filepath.Join(at, "a/b/file"), nil, 0o600))
	for link, to := range map[string]string{"absolute": "/a/b", "outside": "../../../../a", "a/up": "..", "loop": "/loop", "a/to-file": "b/file"} {
		must.Succeed(t, os.Symlink(to, filepath.Join(at, link)))
	}
	root, err := dir.Open(at)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, root.Close()) }()
	ids := func(paths ...string) (ids []dir.ID) {
		for _, path := range paths {
			d, err := dir.OpenParent(filepath.Join(at, path, "any"))
			must.Succeed(t, err)
			id, err := d.ID()
			must.Succeed(t, errors.Join(err, d.Close()))
			ids = append(ids, id)
		}
		return ids
	}
	for path, want := range map[string][]dir.ID{
		"/": ids("/"), "/a/b": ids("a/b", "a", "/"), "/absolute": ids("a/b", "a", "/"), "/outside": ids("a", "/"), "/a/up/absolute/": ids("a/b", "a", "/"),
	} {
		if got, err := dir.Lookup(root, path); err != nil || cmp.Diff(want, got) != "" {
			t.Errorf("%s: %v (%v), want %v", path, got, err, want)
		}
	}
	for _, file := range []string{"/a/b/file", "/absolute/file", "/a/to-file"} {
		if got, err := dir.Lookup(root, file); err != nil || len(got) != 4 || cmp.Diff(ids("a/b", "a", "/"), got[1:]) != "" {
			t.Errorf("%s: %v (%v)", file, got, err)
		}
	}
	for path, want := range map[string]error{"/none": fs.ErrNotExist, "/a/b/file/x": dir.ErrNotDirectory} {
		if got, err := dir.Lookup(root, path); !errors.Is(err, want) {
			t.Errorf("%s: %v (%v)", path, got, err)
		}
	}
	if got, err := dir.Lookup(root, "/loop"); err == nil || dir.IsMissing(err) {
		t.Errorf("/loop: %v (%v)", got, err)
	}
}
