package testenv

import (
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// Bury moves a directory below 70 others beside it, as a pod can without privileges: its path is longer than PATH_MAX, and in a
// mount table, which has four bytes for each newline, longer than 64 KiB.
func Bury(t testing.TB, path string) {
	t.Helper()
	const directory = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC
	top, err := unix.Open(filepath.Dir(path), directory, 0)
	must.Succeed(t, err)
	at, name := top, strings.Repeat("\n", unix.NAME_MAX)
	for range 70 {
		must.Succeed(t, unix.Mkdirat(at, name, 0o777))
		below, err := unix.Openat(at, name, directory, 0)
		must.Succeed(t, err)
		if at != top {
			must.Succeed(t, unix.Close(at))
		}
		at = below
	}
	must.Succeed(t, unix.Renameat(top, filepath.Base(path), at, filepath.Base(path)), unix.Close(at), unix.Close(top))
}
