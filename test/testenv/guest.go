package testenv

import (
	"os"
	"testing"
)

// Guest reports whether this is the guest of test/cmd/kernel, whose processor may be emulated, and
// where XFS and ext4 have quotas.
func Guest() bool { return os.Getenv("HOSTPATH_KERNEL") != "" }

// GuestVariable is the value of a variable that the guest sets.
func GuestVariable(t testing.TB, name string) string {
	t.Helper()
	value := os.Getenv(name)
	if value == "" {
		t.Fatalf("$HOSTPATH_KERNEL is set, but $%s is not", name)
	}
	return value
}

// GuestDisk is where the guest has mounted the disk that a variable names.
func GuestDisk(variable string) func(*testing.T) string {
	return func(t *testing.T) string {
		t.Helper()
		return GuestVariable(t, variable)
	}
}

// GuestDir makes a directory on such a disk, and removes it at the end of the test.
func GuestDir(t testing.TB, variable string) string {
	t.Helper()
	path, err := os.MkdirTemp(GuestVariable(t, variable), "test-") //nolint:usetesting // t.TempDir is on another filesystem
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(path); err != nil {
			t.Error(err)
		}
	})
	return path
}
