package clone

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A file may be cut off at any time while it is read.
func TestFileIsCutOffWhileItIsRead(t *testing.T) {
	dir := t.TempDir()
	from, err := os.Create(filepath.Join(dir, "from"))
	must.Succeed(t, err)
	to, err := os.Create(filepath.Join(dir, "to"))
	must.Succeed(t, err)
	end, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-end:
				ended <- nil
				return
			default:
			}
			_, err := from.WriteAt([]byte("content"), 64<<10)
			if err = errors.Join(err, from.Truncate(0)); err != nil {
				ended <- err
				return
			}
		}
	}()
	buffer := make([]byte, bufferBytes)
	for range 20_000 {
		if err = copyData(int(to.Fd()), int(from.Fd()), func() error { return nil }, buffer); err != nil {
			break
		}
	}
	close(end)
	must.Succeed(t, err, <-ended, from.Close(), to.Close())
}

// A regular file that has taken the name of what is copied without being opened may have attributes that the copy cannot have.
func TestRegularFileTakesNameOfAnother(t *testing.T) {
	testenv.NeedRoot(t)
	for kind, mode := range map[string]uint32{"pipe": unix.S_IFIFO, "device": unix.S_IFCHR, "link": unix.S_IFLNK} {
		t.Run(kind, func(t *testing.T) {
			src, dst := t.TempDir(), t.TempDir()
			name := filepath.Join(src, "name")
			if mode == unix.S_IFLNK {
				must.Succeed(t, os.Symlink("target", name))
			} else {
				must.Succeed(t, unix.Mknod(name, mode|0o600, 0))
			}
			in, to := open(t, src), open(t, dst)
			st, err := stat(in, "name")
			must.Succeed(t, err)
			other := filepath.Join(src, "other")
			must.Succeed(t, os.WriteFile(other, nil, 0o600), unix.Setxattr(other, "user.of", []byte("a regular file"), 0), os.Rename(other, name))
			e := &entryCopier{ctx: t.Context(), start: moment{set: true}}
			must.ErrorIs(t, e.makeNode(source{in, "name", st}, to, "name"), ErrGone)
			if left, err := os.ReadDir(dst); err != nil || len(left) > 0 {
				t.Errorf("the copy has %v, %v", left, err)
			}
		})
	}
}
