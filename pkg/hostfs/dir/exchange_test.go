package dir_test

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// exchange swaps two names in one step (renameat2(2), RENAME_EXCHANGE).
func exchange(t *testing.T, root, a, b string) {
	t.Helper()
	err := unix.Renameat2(unix.AT_FDCWD, filepath.Join(root, a), unix.AT_FDCWD, filepath.Join(root, b), unix.RENAME_EXCHANGE)
	if err != nil {
		t.Error(err)
	}
}
