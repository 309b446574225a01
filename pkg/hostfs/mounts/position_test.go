package mounts_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mounts"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A process cannot go up from the root of a mount to what is above it in the filesystem.
func TestPosition_isTheSameByAnyMount(t *testing.T) {
	testenv.NeedRoot(t)
	at := t.TempDir()
	for _, name := range []string{"a/sub/deep", "ab", "mounted"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(at, name), 0o755))
	}
	for _, name := range []string{"a/sub/file", "file"} {
		must.Succeed(t, os.WriteFile(filepath.Join(at, name), nil, 0o600))
	}
	for from, to := range map[string]string{"a/sub": "mounted", "a/sub/file": "file"} {
		target := filepath.Join(at, to)
		must.Succeed(t, unix.Mount(filepath.Join(at, from), target, "", unix.MS_BIND, ""))
		t.Cleanup(func() { must.Succeed(t, unix.Unmount(target, 0)) })
	}
	table, err := mounts.ReadTable()
	must.Succeed(t, err)
	root, err := dir.Open("/")
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, root.Close()) })
	position := func(path string) mounts.Position {
		t.Helper()
		d, err := dir.Resolve(root, filepath.Join(at, path))
		must.Succeed(t, err)
		defer func() { must.Succeed(t, d.Close()) }()
		p, err := table.Position(d)
		must.Succeed(t, err)
		return p
	}
	for path, same := range map[string]string{"mounted": "a/sub", "mounted/deep": "a/sub/deep", "mounted/file": "a/sub/file", "file": "a/sub/file"} {
		if got, want := position(path), position(same); got != want {
			t.Errorf("%s is %+v, and %s is %+v", path, got, same, want)
		}
	}
	for path, inside := range map[string]bool{"a": true, "mounted": true, "mounted/deep": true, "file": true, "ab": false, "": false} {
		if got := position(path).Inside(position("a")); got != inside {
			t.Errorf("%s is inside: %t", path, got)
		}
	}
	if !position("a").Inside(mounts.Position{Major: position("a").Major, Minor: position("a").Minor, Path: "/"}) {
		t.Error("something is not inside the root of its filesystem")
	}
}
