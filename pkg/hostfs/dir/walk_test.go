package dir_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// visits are what Walk has told, by the paths that the kernel tells of handles.
type visits struct {
	seen map[string]int // when
	most int            // descriptors
}

func walk(t *testing.T, d *dir.Dir, also func(path string)) (visits, error) {
	t.Helper()
	v := visits{seen: make(map[string]int)}
	note := func(at *dir.Dir, name string) error {
		path, err := os.Readlink(at.HandlePath())
		must(t, err)
		path = filepath.Join(path, name)
		if v.seen[path] > 0 {
			t.Errorf("%s was visited twice", path)
		}
		v.seen[path] = len(v.seen) + 1
		v.most = max(v.most, descriptors(t))
		also(path)
		return nil
	}
	err := d.Walk(note, func(d *dir.Dir) error { return note(d, "") })
	return v, err
}

func TestWalkVisitsEverythingOnceAndDirectoriesAfterWhatTheyHold(t *testing.T) {
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
			must(t, err)
			wantAll(t, d, v)
			if most := v.most - before; most > 70 {
				t.Errorf("%d descriptors were open, want 70 at most", most)
			}
			if after := descriptors(t); after != before {
				t.Errorf("%d descriptors after it, and %d before", after, before)
			}
		})
	}
}

// buildUp makes a tower with something beside each of its directories.
func buildUp(t *testing.T, d *dir.Dir, subvolumes bool) {
	t.Helper()
	for i := range 200 {
		// The first do not fit into what is read at once.
		for n := range max(2, 300-100*i) {
			must(t, os.WriteFile(filepath.Join(d.HandlePath(), fmt.Sprint(n)), nil, 0o600))
		}
		must(t, os.MkdirAll(filepath.Join(d.HandlePath(), "beside", "below"), 0o755))
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
			t.Errorf("%s was visited after the directory that has it", path)
		}
	}
	if len(v.seen) != len(all) {
		t.Errorf("%d visits of %d entries", len(v.seen), len(all))
	}
}

// find has the paths of all below, as another program finds them.
func find(t *testing.T, d *dir.Dir) (all []string) {
	t.Helper()
	must(t, filepath.WalkDir(d.String(), func(path string, _ os.DirEntry, err error) error {
		if path != d.String() {
			all = append(all, path)
		}
		return err
	}))
	return all
}

func TestWalkEntersNeitherLinksNorMounts(t *testing.T) {
	testenv.NeedRoot(t)
	outside, root := t.TempDir(), t.TempDir()
	must(t, os.WriteFile(filepath.Join(outside, "canary"), nil, 0o600))
	must(t, os.Symlink(outside, filepath.Join(root, "link")))
	mounted := filepath.Join(root, "mounted")
	must(t, os.Mkdir(mounted, 0o755))
	must(t, syscall.Mount(outside, mounted, "", syscall.MS_BIND, ""))
	defer func() { must(t, syscall.Unmount(mounted, 0)) }()
	v, err := walk(t, open(t, root), func(string) {})
	must(t, err)
	if len(v.seen) != 1 || v.seen[filepath.Join(root, "link")] == 0 {
		t.Errorf("visited %v, want the link alone", v.seen)
	}
}

func TestWalkEndsWithTheFirstError(t *testing.T) {
	d := open(t, t.TempDir())
	high(t, d, 100)
	before, failed := descriptors(t), errors.New("failed")
	for name, err := range map[string]error{
		"of a file":      d.Walk(func(*dir.Dir, string) error { return failed }, func(*dir.Dir) error { return nil }),
		"of a directory": d.Walk(func(*dir.Dir, string) error { return nil }, func(*dir.Dir) error { return failed }),
	} {
		t.Run(name, func(t *testing.T) { wantError(t, err, failed) })
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors after it, and %d before", after, before)
	}
}

// Of a deep directory those above it are closed, and found again as its parents.
func TestWalkDoesNotLeaveWithADirectoryThatIsMovedOut(t *testing.T) {
	root := t.TempDir()
	outside := filepath.Join(root, "outside")
	must(t, os.MkdirAll(filepath.Join(outside, "a"), 0o755))
	must(t, os.WriteFile(filepath.Join(outside, "canary"), nil, 0o600))
	volume := filepath.Join(root, "volume")
	must(t, os.MkdirAll(volume+strings.Repeat("/d", 200), 0o755))
	bottom := volume + strings.Repeat("/d", 200)
	must(t, os.WriteFile(filepath.Join(bottom, "file"), nil, 0o600))
	v, err := walk(t, open(t, volume), func(path string) {
		if filepath.Base(path) == "file" {
			must(t, os.Rename(volume+strings.Repeat("/d", 100), filepath.Join(outside, "d")))
		}
	})
	if err == nil || !strings.Contains(err.Error(), "moved meanwhile") {
		t.Errorf("the walk: %v, want that a directory was moved", err)
	}
	for _, path := range []string{"canary", "a"} {
		if v.seen[filepath.Join(outside, path)] > 0 {
			t.Errorf("%s outside was visited", path)
		}
	}
}
