package dir_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestCached_coldIsEAGAIN(t *testing.T) {
	testenv.NeedRoot(t)
	for kind, bytes := range map[string]int64{"ext4": 32 << 20, "xfs": 300 << 20, "btrfs": 128 << 20} {
		t.Run(kind, func(t *testing.T) {
			root := testenv.LoopFS(t, kind, bytes)
			must.Succeed(t, os.Mkdir(filepath.Join(root, "sub"), 0o700))
			must.Succeed(t, os.WriteFile(filepath.Join(root, "file"), []byte("content"), 0o600))
			// A remount drops all cached names (shrink_dcache_sb).
			must.Succeed(t, syscall.Mount("", root, "", syscall.MS_REMOUNT, ""))
			d, err := dir.OpenCached(root)
			must.Succeed(t, err)
			defer func() { must.Succeed(t, d.Close()) }()
			_, err = d.OpenCached("sub")
			must.ErrorIs(t, err, unix.EAGAIN)
			_, err = dir.ReadCached(d, "file", 100)
			must.ErrorIs(t, err, unix.EAGAIN)

			must.Succeed(t, open(t, root).Sync())
			_, err = d.ReadFile("file", 100)
			must.Succeed(t, err)
			sub, err := d.Open("sub")
			must.Succeed(t, errors.Join(err, sub.Close()))
			if data, err := dir.ReadCached(d, "file", 100); string(data) != "content" || err != nil {
				t.Errorf("read %q, %v", data, err)
			}
			sub, err = d.OpenCached("sub")
			must.Succeed(t, errors.Join(err, sub.Close()))
		})
	}
}

// A FUSE filesystem whose server never answers.
func TestCached_hungFilesystemDoesNotBlock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hung")
	testenv.Hang(t, path)
	d, err := dir.OpenCached(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	_, err = dir.WayOf(d)
	must.Succeed(t, err)
	_, err = d.OpenCached("sub")
	must.ErrorIs(t, err, unix.EAGAIN)
	_, err = dir.ReadCached(d, "file", 100)
	must.ErrorIs(t, err, unix.EAGAIN)
}

func TestOpenCached_allOperationsWork(t *testing.T) {
	root := t.TempDir()
	must.Succeed(t, os.MkdirAll(filepath.Join(root, "sub", "below"), 0o700))
	for name, use := range map[string]func(d *dir.Dir) error{
		"Sync":      (*dir.Dir).Sync,
		"Chmod":     func(d *dir.Dir) error { return d.Chmod(0o710) },
		"Touch":     func(d *dir.Dir) error { return dir.Touch(d, "below") },
		"WriteFile": func(d *dir.Dir) error { return d.WriteFile("file", []byte("content")) },
		"Space":     func(d *dir.Dir) error { _, err := dir.SpaceOf(d); return err },
		"ReadFd": func(d *dir.Dir) error {
			fd, err := d.ReadFd()
			return errors.Join(err, unix.Fsync(fd))
		},
		"Entries": func(d *dir.Dir) error {
			for _, err := range d.Entries() {
				return err
			}
			return nil
		},
	} {
		top, err := dir.OpenCached(root)
		must.Succeed(t, err)
		d, err := top.OpenCached("sub")
		must.Succeed(t, err)
		want, err := d.ID()
		must.Succeed(t, err)
		if err := use(d); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got, err := d.ID(); got != want || err != nil {
			t.Errorf("after %s it is %+v, %v; want %+v", name, got, err, want)
		}
		must.Succeed(t, errors.Join(d.Close(), top.Close()))
	}
}

func TestWay(t *testing.T) {
	root := testenv.Tmpfs(t, 1<<20)
	sub := filepath.Join(root, "sub")
	must.Succeed(t, os.Mkdir(sub, 0o700))
	way := func(path string, mountRoot bool) dir.Way {
		d := open(t, path)
		id, err := d.ID()
		must.Succeed(t, err)
		w, err := dir.WayOf(d)
		if w.ID != id || w.MountRoot != mountRoot || err != nil {
			t.Errorf("%s is %+v, %v; want %+v, mounted there: %v", path, w, err, id, mountRoot)
		}
		return w
	}
	if of := way(root, true); way(sub, false).Mount != of.Mount {
		t.Error("two directories of one mount are reached by two")
	}
	if first := way(root, true); first.Mount != 0 {
		must.Succeed(t, unix.Mount(root, sub, "", unix.MS_BIND, ""))
		second := way(sub, true)
		must.Succeed(t, unix.Unmount(sub, unix.MNT_DETACH), unix.Mount(root, sub, "", unix.MS_BIND, ""))
		third := way(sub, true)
		must.Succeed(t, unix.Unmount(sub, unix.MNT_DETACH))
		if first.ID != second.ID || second.ID != third.ID || first.Mount == second.Mount || second.Mount == third.Mount {
			t.Errorf("one directory is %+v, %+v and %+v by three mounts", first, second, third)
		}
	}
}

func TestCached_linksAreRefused(t *testing.T) {
	outside, root := t.TempDir(), t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(outside, "file"), nil, 0o600))
	must.Succeed(t, os.Symlink(outside, filepath.Join(root, "dir")))
	must.Succeed(t, os.Symlink(filepath.Join(outside, "file"), filepath.Join(root, "file")))
	must.Succeed(t, os.Mkdir(filepath.Join(root, "sub"), 0o700))
	d := open(t, root)
	for _, name := range []string{"dir", "file", "sub/..", "..", "", "/etc"} {
		if _, err := d.OpenCached(name); err == nil {
			t.Errorf("OpenCached(%q) opens it", name)
		}
		if _, err := dir.ReadCached(d, name, 100); err == nil {
			t.Errorf("ReadCached(%q) reads it", name)
		}
	}
	must.Succeed(t, os.WriteFile(filepath.Join(root, "large"), make([]byte, 101), 0o600))
	if _, err := dir.ReadCached(d, "large", 100); err == nil {
		t.Error("read more than the limit")
	}
	sub, err := d.OpenCached("sub")
	must.Succeed(t, err)
	must.Succeed(t, sub.Close())
	must.ErrorIs(t, sub.Close(), fs.ErrClosed)
	if err := sub.Sync(); err == nil {
		t.Error("Sync works on a closed handle")
	}
}
