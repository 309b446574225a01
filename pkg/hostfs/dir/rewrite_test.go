package dir_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestRewrite(t *testing.T) {
	path := t.TempDir()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	if err := d.Rewrite("file", []byte("x")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is not there: %v, want ErrNotExist", err)
	}
	must.Succeed(t, os.WriteFile(filepath.Join(path, "file"), []byte("longer"), 0o600))
	must.Succeed(t, d.Rewrite("file", []byte("new")))
	if got, err := os.ReadFile(filepath.Join(path, "file")); err != nil || string(got) != "new" {
		t.Errorf("the file holds %q, %v", got, err)
	}
}
