package mountns_test

import (
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func TestBelow(t *testing.T) {
	pool := testenv.Tmpfs(t, 1<<20)
	odd := filepath.Join(pool, `a b\c`)
	sibling := pool + "2"
	for _, dir := range []string{odd, sibling} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{odd, odd, sibling} {
		if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := syscall.Unmount(dir, 0); err != nil {
				t.Error(err)
			}
		})
	}
	for _, test := range []struct {
		name, dir string
		want      []string
	}{
		{"a directory, its inside and both of two stacked mounts, not a name that begins alike", pool, []string{pool, odd, odd}},
		{"one place", odd, []string{odd, odd}},
		{"nothing", filepath.Join(pool, "x"), nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got, err := mountns.Below(test.dir); err != nil || !slices.Equal(got, test.want) {
				t.Errorf("Below(%s) = %q, %v; want %q", test.dir, got, err, test.want)
			}
		})
	}
}
