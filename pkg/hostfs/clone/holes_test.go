package clone_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
)

// What a filesystem takes for a hole is read, if its kernel does not find all data. What is zero becomes a hole.
func TestCopyFromFilesystemThatFindsNoData(t *testing.T) {
	testenv.NeedRoot(t)
	const hole = 4 << 20
	written := append(make([]byte, hole), bytes.Repeat([]byte{'w'}, 1<<20)...)
	file := filepath.Join(t.TempDir(), "disk")
	must.Succeed(t, os.WriteFile(file, written, 0o600))
	d := disk.New(t, file, t.TempDir())
	d.FindNoData()
	src := must.Value(os.Open(d.Path))(t)
	defer func() { must.Succeed(t, src.Close()) }()
	dst := must.Value(os.Create(filepath.Join(t.TempDir(), "copy")))(t)
	defer func() { must.Succeed(t, dst.Close()) }()
	must.Succeed(t, clone.File(t.Context(), dst, src, clone.Copy))
	if is := must.Value(os.ReadFile(dst.Name()))(t); !bytes.Equal(is, written) {
		t.Errorf("the copy has %d bytes, of which %d are 'w'", len(is), bytes.Count(is, []byte{'w'}))
	}
	if at := must.Value(unix.Seek(int(dst.Fd()), 0, unix.SEEK_DATA))(t); at != hole {
		t.Errorf("the data of the copy begins at %d, want %d", at, hole)
	}
}
