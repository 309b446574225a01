// Package fulldisk takes all the space that a filesystem has, for tests of what works without any.
package fulldisk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// A Shortage is what a filesystem has none of. XFS has some left without
// bytes, and these are taken with the bytes. Ext4 has a fixed number: to take many lasts long (mkfs.ext4 -N).
type Shortage struct{ Bytes, Inodes bool }

const (
	mib = 1 << 20
	// leastBlock is the smallest block of all filesystems that are filled.
	leastBlock = 1 << 10
)

// Inlined is the size of files, in bytes, that btrfs keeps in its metadata. For that it has other space than for data.
const Inlined = 2 << 10

// Fill makes files in a directory until nothing is left. Empty removes them.
func Fill(t testing.TB, dir string, lack Shortage) {
	t.Helper()
	var fs unix.Statfs_t
	must.Succeed(t, unix.Statfs(dir, &fs))
	if lack.Bytes {
		Large(t, dir, 0)
		Small(t, dir, Inlined)
	}
	if lack.Inodes || fs.Type != unix.EXT4_SUPER_MAGIC {
		Small(t, dir, 0)
	}
}

// Empty removes all files in a directory.
func Empty(t testing.TB, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	must.Succeed(t, err)
	for _, file := range files {
		must.Succeed(t, os.Remove(file))
	}
}

// Large takes all in one file, but for so many bytes.
func Large(t testing.TB, dir string, left int64) {
	t.Helper()
	file, err := os.Create(filepath.Join(dir, "large"))
	must.Succeed(t, err)
	size := int64(0)
	for step := int64(64 * mib); step >= leastBlock; {
		err := unix.Fallocate(int(file.Fd()), 0, size, step)
		switch {
		case err == nil:
			size += step
		case errors.Is(err, unix.ENOSPC):
			step /= 2
		case !errors.Is(err, unix.EINTR):
			t.Fatal(err)
		}
	}
	must.Succeed(t, errors.Join(file.Truncate(max(0, size-left)), file.Sync(), file.Close()))
}

// Small takes what is left for files of so many bytes, whose names SmallName has. Btrfs may find more after it said
// that it is full, so it is asked again once all is written.
func Small(t testing.TB, dir string, bytes int) {
	t.Helper()
	made := 0
	for full := 0; full < 4; {
		err := os.WriteFile(filepath.Join(dir, SmallName(bytes, made)), make([]byte, bytes), 0o600)
		switch {
		case err == nil:
			full = 0
			made++
		case errors.Is(err, unix.ENOSPC):
			full++
			d, err := os.Open(dir)
			must.Succeed(t, err)
			must.Succeed(t, errors.Join(unix.Syncfs(int(d.Fd())), d.Close()))
		default:
			t.Fatal(err)
		}
	}
	t.Logf("%d files of %d bytes", made, bytes)
}

// SmallName is the name of one that Small makes, from 0 on.
func SmallName(bytes, i int) string { return fmt.Sprintf("small-%d-%d", bytes, i) }
