package rotten

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// Mount mounts an ext4 with what fill puts into a directory, until the test ends. The inodes of some entries are not on the disk any
// more: they are listed, and cannot be looked up. Those that end in a slash are directories that can, and cannot be listed.
func Mount(t testing.TB, at string, fill func(root string), entries ...string) {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "mkfs.ext4", "mount", "debugfs")
	tree, image := t.TempDir(), filepath.Join(t.TempDir(), "image")
	fill(tree)
	file, err := os.Create(image)
	must.Succeed(t, err)
	must.Succeed(t, errors.Join(file.Truncate(bytesOnDisk), file.Close()))
	run(t, "mkfs.ext4", "-q", "-d", tree, image)
	for _, entry := range entries {
		if directory, is := strings.CutSuffix(entry, "/"); is {
			rotDirectory(t, image, directory)
		} else {
			run(t, "debugfs", "-w", "-R", "clri /"+entry, image)
		}
	}
	must.Succeed(t, os.MkdirAll(at, 0o755))
	must.Succeed(t, loopfs.MountImage(t.Context(), image, at, "ext4", "errors=continue"))
	t.Cleanup(func() { must.Succeed(t, loopfs.Unmount(at)) })
}

// rotDirectory overwrites the first block of a directory.
func rotDirectory(t testing.TB, image, directory string) {
	t.Helper()
	file, err := os.OpenFile(image, os.O_RDWR, 0)
	must.Succeed(t, err)
	_, err = file.WriteAt(bytes.Repeat([]byte{0xff}, int(blockSize(t, image))), blockOf(t, image, directory))
	must.Succeed(t, errors.Join(err, file.Close()))
}

// blockOf is where on the disk the first block of an entry is.
func blockOf(t testing.TB, image, entry string) int64 {
	t.Helper()
	blocks := strings.Fields(string(run(t, "debugfs", "-R", "blocks /"+entry, image)))
	first, err := strconv.ParseInt(blocks[0], 10, 64)
	must.Succeed(t, err)
	return first * blockSize(t, image)
}
