package clone

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func makeSubvolume(t *testing.T, in *dir.Dir, name string) {
	t.Helper()
	args := ioctl.Subvolume{}
	copy(args.Name[:], name)
	must.Succeed(t, ioctl.Do(in, ioctl.CreateSubvolume, &args))
}

func openAt(t *testing.T, path ...string) *dir.Dir {
	t.Helper()
	d, err := dir.Open(filepath.Join(path...))
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, d.Close()) })
	return d
}

// What is in a snapshot is known from the snapshot: a subvolume may have been made and removed around it.
func TestNamesSubvolume(t *testing.T) {
	root := testenv.LoopFS(t, "btrfs", 256<<20)
	top := openAt(t, root)
	makeSubvolume(t, top, "src")
	src := openAt(t, root, "src")
	inside := func(files int, where string) {
		t.Helper()
		must.Succeed(t, os.MkdirAll(filepath.Join(root, "src", where), 0o755))
		for n := range files { // so that the answer does not fit into one buffer
			must.Succeed(t, os.WriteFile(filepath.Join(root, "src", where, fmt.Sprint(n, strings.Repeat("x", 200))), nil, 0o600))
		}
	}
	inside(10, "before")
	since, err := generation(src)
	must.Succeed(t, err)
	if since == 0 {
		t.Error("the kernel does not say the generation")
	}
	wantInSnapshot := func(name string, want bool) {
		t.Helper()
		must.Succeed(t, Subvolume(src, top, name))
		for _, gone := range []string{"a", "z"} {
			if err := os.Remove(filepath.Join(root, "src", gone, "inside")); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Error(err)
			}
		}
		if n, err := Nested(src); err != nil || n != 0 {
			t.Errorf("%d subvolumes are inside (%v), want none any more", n, err)
		}
		for _, since := range []uint64{since, 0} {
			if got, err := namesSubvolume(openAt(t, root, name), since); err != nil || got != want {
				t.Errorf("%s from generation %d: %t (%v), want %t", name, since, got, err, want)
			}
		}
	}
	inside(2000, "a")
	wantInSnapshot("none", false)
	makeSubvolume(t, openAt(t, root, "src", "a"), "inside")
	wantInSnapshot("in the first", true)
	inside(2000, "m")
	inside(0, "z")
	makeSubvolume(t, openAt(t, root, "src", "z"), "inside")
	wantInSnapshot("in the last", true)
	wantInSnapshot("none again", false)
}
