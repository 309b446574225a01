package dir_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// exchange swaps two names in one step (renameat2(2), RENAME_EXCHANGE).
func exchange(t *testing.T, root, a, b string) {
	t.Helper()
	err := unix.Renameat2(unix.AT_FDCWD, filepath.Join(root, a), unix.AT_FDCWD, filepath.Join(root, b), unix.RENAME_EXCHANGE)
	if err != nil {
		t.Error(err)
	}
}

// A tenant swaps directories inside the volume while it is removed.
func TestRemoveTree_directorySwappedForLinkIsNotFollowed(t *testing.T) {
	outside := t.TempDir()
	must.Succeed(t, os.MkdirAll(filepath.Join(outside, "a", "b"), 0o755))
	must.Succeed(t, os.WriteFile(filepath.Join(outside, "canary"), nil, 0o600))
	root := t.TempDir()
	d := open(t, root)
	for round := range 50 {
		must.Succeed(t, os.MkdirAll(filepath.Join(root, "volume"), 0o755))
		tenant := open(t, filepath.Join(root, "volume"))
		for i := range 20 {
			must.Succeed(t, os.MkdirAll(filepath.Join(root, "volume", fmt.Sprint(i), "a", "b"), 0o755))
			must.Succeed(t, os.Symlink(outside, filepath.Join(root, "volume", fmt.Sprintf("link-%d", i))))
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for i := range 2000 {
				// Most of them are removed by then.
				_ = unix.Renameat2(tenant.Fd(), fmt.Sprint(i%20), tenant.Fd(), fmt.Sprintf("link-%d", i%20), unix.RENAME_EXCHANGE)
			}
		}()
		// Entries that were swapped away meanwhile are left to the next call.
		_ = dir.RemoveTree(t.Context(), d, "volume", noPause)
		<-done
		must.Succeed(t, dir.RemoveTree(t.Context(), d, "volume", noPause))
		for _, path := range []string{"canary", "a/b"} {
			if _, err := os.Stat(filepath.Join(outside, path)); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
	}
}

func TestWalk_directorySwappedForLinkIsNotFollowed(t *testing.T) {
	outside := t.TempDir()
	must.Succeed(t, os.MkdirAll(filepath.Join(outside, "canary", "canary"), 0o755))
	root := t.TempDir()
	deep := root + strings.Repeat("/d", 100)
	for i := range 20 {
		must.Succeed(t, os.MkdirAll(filepath.Join(deep, fmt.Sprint(i), "a", "b"), 0o755))
		must.Succeed(t, os.Symlink(outside, filepath.Join(deep, fmt.Sprintf("link-%d", i))))
	}
	tenant, d := open(t, deep), open(t, root)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 5000 {
			if err := unix.Renameat2(tenant.Fd(), fmt.Sprint(i%20), tenant.Fd(), fmt.Sprintf("link-%d", i%20), unix.RENAME_EXCHANGE); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	defer func() { <-done }()
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		must.Succeed(t, dir.Walk(d,
			func(_ *dir.Dir, name string) error { return noCanary(name) },
			func(d *dir.Dir) error { return noCanary(filepath.Base(d.String())) },
		))
	}
}

func noCanary(name string) error {
	if name == "canary" {
		return errors.New("entered the directory outside")
	}
	return nil
}
