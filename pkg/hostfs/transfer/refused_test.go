package transfer_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// onFailingDisk is a filesystem on a disk that can fail.
func onFailingDisk(t *testing.T, kind string) (at string, d *disk.Disk) {
	t.Helper()
	image := must.Value(loopfs.Format(t.Context(), t.TempDir(), kind, 320*mib))(t)
	d = disk.New(t, image, t.TempDir())
	at = t.TempDir()
	must.Succeed(t, os.Remove(image))
	d.Mount(t, at, kind)
	return at, d
}

// fromDisk has a file be read from the disk from now on.
func fromDisk(t *testing.T, path string) {
	t.Helper()
	f := must.Value(os.Open(path))(t)
	must.Succeed(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED), f.Close())
}

// What a disk has refused is in memory as if it had been written, and the kernel says so once. A connection that doubts the copy has it sent again.
func TestWriteThatTheDiskRefused(t *testing.T) {
	testenv.NeedRoot(t)
	for _, kind := range []string{"xfs", "ext4", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			root, d := onFailingDisk(t, kind)
			src, dst := filepath.Join(testenv.LoopFS(t, "xfs", 512*mib), "volume"), filepath.Join(root, "volume")
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
			content := bytes.Repeat([]byte("what is refused "), mib/16)
			must.Succeed(t, os.WriteFile(filepath.Join(src, "file"), content, 0o600))

			d.RefuseWritesOf(content[:64])
			c := connect(t, dst, transfer.Options{})
			c.pass(src, whole)
			if c.Finish(t.Context()) == nil {
				t.Fatal("the disk has refused nothing")
			}
			c.cut()
			d.Heal()

			c = connect(t, dst, transfer.Options{Doubted: true})
			c.pass(src, whole)
			c.finish()
			copied := filepath.Join(dst, "file")
			fromDisk(t, copied)
			if is := must.Value(os.ReadFile(copied))(t); !bytes.Equal(is, content) {
				t.Errorf("the disk has %d of %d bytes of the file", len(is)-bytes.Count(is, []byte{0}), len(content))
			}
		})
	}
}

// A file that has as many names as ext4 allows does not move there, where the copy needs two more meanwhile: that is said, with one of its names.
func TestFileWithTheMostNames(t *testing.T) {
	root := testenv.LoopFS(t, "ext4", 64*mib)
	src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
	must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o755))
	for _, in := range []string{src, dst} {
		write(t, filepath.Join(in, "file"), "x")
		must.Succeed(t, os.Link(filepath.Join(in, "file"), filepath.Join(in, "second")))
	}
	names := 2
	for err := error(nil); err == nil; names++ {
		err = os.Link(filepath.Join(dst, "file"), filepath.Join(dst, fmt.Sprint(names)))
	}
	_, err := connect(t, dst, transfer.Options{}).Pass(t.Context(), open(t, src), transfer.Pass{})
	if err == nil || !strings.Contains(err.Error(), ": too many links: the filesystem here allows too few names of one file") {
		t.Errorf("with %d names: %v", names-1, err)
	}
}
