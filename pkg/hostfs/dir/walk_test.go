package dir_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// visits are the visited paths, as the kernel reports them for the handles.
type visits struct {
	seen map[string]int // path to its position in the order
	most int            // open descriptors
}

func walk(t *testing.T, d *dir.Dir, also func(path string)) (visits, error) {
	t.Helper()
	v := visits{seen: make(map[string]int)}
	note := func(at *dir.Dir, name string) error {
		path, err := os.Readlink(at.HandlePath())
		must.Succeed(t, err)
		path = filepath.Join(path, name)
		if v.seen[path] > 0 {
			t.Errorf("%s was visited twice", path)
		}
		v.seen[path] = len(v.seen) + 1
		v.most = max(v.most, descriptors(t))
		also(path)
		return nil
	}
	err := dir.Walk(d, note, func(d *dir.Dir) error { return note(d, "") })
	return v, err
}

func TestWalk_everyEntryOnceChildrenFirst(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	for name, mount := range map[string]func() string{
		"tmpfs": func() string { return testenv.Tmpfs(t, 64<<20) },
		"ext4":  func() string { return testenv.LoopFS(t, "ext4", 64<<20) },
		"xfs":   func() string { return testenv.LoopFS(t, "xfs", 300<<20) },
		"btrfs": func() string { return testenv.LoopFS(t, "btrfs", 128<<20) },
	} {
		t.Run(name, func(t *testing.T) {
			d := open(t, mount())
			buildUp(t, d, name == "btrfs")
			before := descriptors(t)
			v, err := walk(t, d, func(string) {})
			must.Succeed(t, err)
			wantAll(t, d, v)
			if most := v.most - before; most > 70 {
				t.Errorf("%d open descriptors, want at most 70", most)
			}
			if after := descriptors(t); after != before {
				t.Errorf("%d open descriptors after the walk, %d before", after, before)
			}
		})
	}
}

// buildUp makes deeply nested directories with entries next to each.
func buildUp(t *testing.T, d *dir.Dir, subvolumes bool) {
	t.Helper()
	for i := range 200 {
		// The first ones have more entries than one getdents64(2) returns.
		for n := range max(2, 300-100*i) {
			must.Succeed(t, os.WriteFile(filepath.Join(d.HandlePath(), fmt.Sprint(n)), nil, 0o600))
		}
		must.Succeed(t, os.MkdirAll(filepath.Join(d.HandlePath(), "sibling", "below"), 0o755))
		if subvolumes && i%20 == 0 {
			d = subvolume(t, d, "d")
		} else {
			d = child(t, d, "d")
		}
	}
}

func wantAll(t *testing.T, d *dir.Dir, v visits) {
	t.Helper()
	all := find(t, d)
	for _, path := range all {
		if v.seen[path] == 0 {
			t.Errorf("%s was not visited", path)
		}
		if parent := v.seen[filepath.Dir(path)]; parent > 0 && parent < v.seen[path] {
			t.Errorf("%s was visited after its directory", path)
		}
	}
	if len(v.seen) != len(all) {
		t.Errorf("%d visits of %d entries", len(v.seen), len(all))
	}
}

// find lists all paths below, as find(1) reports them.
func find(t *testing.T, d *dir.Dir) (all []string) {
	t.Helper()
	must.Succeed(t, filepath.WalkDir(d.String(), func(path string, _ os.DirEntry, err error) error {
		if path != d.String() {
			all = append(all, path)
		}
		return err
	}))
	return all
}

func TestWalk_skipsLinksAndMounts(t *testing.T) {
	testenv.NeedRoot(t)
	outside, root := t.TempDir(), t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(outside, "canary"), nil, 0o600))
	must.Succeed(t, os.Symlink(outside, filepath.Join(root, "link")))
	mounted := filepath.Join(root, "mounted")
	must.Succeed(t, os.Mkdir(mounted, 0o755))
	must.Succeed(t, syscall.Mount(outside, mounted, "", syscall.MS_BIND, ""))
	defer func() { must.Succeed(t, syscall.Unmount(mounted, 0)) }()
	v, err := walk(t, open(t, root), func(string) {})
	must.Succeed(t, err)
	if len(v.seen) != 1 || v.seen[filepath.Join(root, "link")] == 0 {
		t.Errorf("visited %v, want only the link", v.seen)
	}
}

func TestWalk_stopsAtFirstError(t *testing.T) {
	d := open(t, t.TempDir())
	high(t, d, 100)
	before, failed := descriptors(t), errors.New("failed")
	for name, err := range map[string]error{
		"of a file":      dir.Walk(d, func(*dir.Dir, string) error { return failed }, func(*dir.Dir) error { return nil }),
		"of a directory": dir.Walk(d, func(*dir.Dir, string) error { return nil }, func(*dir.Dir) error { return failed }),
	} {
		t.Run(name, func(t *testing.T) { must.ErrorIs(t, err, failed) })
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d open descriptors after the walk, %d before", after, before)
	}
}

// Deep down, the handles of the upper directories are closed and later reopened as parents.
func TestWalk_movedDirectoryIsAnError(t *testing.T) {
	root := t.TempDir()
	outside := filepath.Join(root, "outside")
	must.Succeed(t, os.MkdirAll(filepath.Join(outside, "a"), 0o755))
	must.Succeed(t, os.WriteFile(filepath.Join(outside, "canary"), nil, 0o600))
	volume := filepath.Join(root, "volume")
	must.Succeed(t, os.MkdirAll(volume+strings.Repeat("/d", 200), 0o755))
	bottom := volume + strings.Repeat("/d", 200)
	must.Succeed(t, os.WriteFile(filepath.Join(bottom, "file"), nil, 0o600))
	v, err := walk(t, open(t, volume), func(path string) {
		if filepath.Base(path) == "file" {
			must.Succeed(t, os.Rename(volume+strings.Repeat("/d", 100), filepath.Join(outside, "d")))
		}
	})
	if err == nil || !strings.Contains(err.Error(), "moved meanwhile") {
		t.Errorf("walk: %v, want an error about a moved directory", err)
	}
	for _, path := range []string{"canary", "a"} {
		if v.seen[filepath.Join(outside, path)] > 0 {
			t.Errorf("%s outside was visited", path)
		}
	}
}

// The path of a directory is kept with its handle, and a tower has many: it does not grow without end, and still says
// where the directory is and how it is called.
func TestPathsOfDeepDirectoriesAreBounded(t *testing.T) {
	root := open(t, t.TempDir())
	name := strings.Repeat("d", 255)
	at, err := root.Reopen()
	must.Succeed(t, err)
	want := func(ends string) {
		t.Helper()
		if got := at.String(); len(got) > 1024 || !strings.HasPrefix(got, root.String()) || !strings.HasSuffix(got, ends) {
			t.Errorf("%d bytes: %s", len(got), got)
		}
	}
	var above []dir.ID
	for range 400 {
		id, err := at.ID()
		must.Succeed(t, err)
		above = append(above, id)
		next, err := at.Make(name)
		must.Succeed(t, err, at.Close())
		at = next
	}
	want("/" + name)
	for _, id := range slices.Backward(above) {
		next, err := dir.Parent(at, id)
		must.Succeed(t, err, at.Close())
		at = next
	}
	want("/..")
	must.Succeed(t, at.Close())
}
