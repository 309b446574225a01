package dir_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestRewrite(t *testing.T) {
	path := t.TempDir()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	if err := dir.Rewrite(d, "file", []byte("x")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is not there: %v, want ErrNotExist", err)
	}
	must.Succeed(t, os.WriteFile(filepath.Join(path, "file"), []byte("longer"), 0o600))
	must.Succeed(t, dir.Rewrite(d, "file", []byte("new")))
	if got, err := os.ReadFile(filepath.Join(path, "file")); err != nil || string(got) != "new" {
		t.Errorf("the file holds %q, %v", got, err)
	}
}

// A hole would be read as what was written: a driver would take its own sign of life for that of another.
func TestRewrite_fullFilesystem(t *testing.T) {
	path := testenv.Tmpfs(t, 64<<10)
	file := filepath.Join(path, "file")
	must.Succeed(t, os.WriteFile(file, nil, 0o600))
	if err := os.WriteFile(filepath.Join(path, "large"), make([]byte, 128<<10), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	d, err := dir.Open(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	if err := dir.Rewrite(d, "file", []byte("new")); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("rewrite: %v, want ENOSPC", err)
	}
	if got, err := os.ReadFile(file); err != nil || len(got) > 0 {
		t.Errorf("the file holds %q, %v", got, err)
	}
}
