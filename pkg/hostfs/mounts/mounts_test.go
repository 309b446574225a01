package mounts_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mounts"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// newPlace is an empty directory, of which nothing is left mounted when the test ends.
func newPlace(t *testing.T) (place mounts.Place, path string) {
	t.Helper()
	testenv.NeedRoot(t)
	path = filepath.Join(t.TempDir(), "place")
	must.Succeed(t, os.Mkdir(path, 0o755))
	place = mounts.Place{Parent: open(t, filepath.Dir(path)), Name: filepath.Base(path)}
	t.Cleanup(func() {
		for state(t, place).Mounted {
			must.Succeed(t, place.Unmount())
		}
	})
	return place, path
}

func open(t *testing.T, path string) *dir.Dir {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, d.Close()) })
	return d
}

func state(t *testing.T, p mounts.Place) mounts.State {
	t.Helper()
	s, err := p.State()
	must.Succeed(t, err)
	return s
}

func TestMountClone(t *testing.T) {
	place, path := newPlace(t)
	source := t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(source, "data"), []byte("x"), 0o600))
	tree, err := mounts.Clone(open(t, source))
	must.Succeed(t, err)
	if s := state(t, place); s.Mounted || !s.IsDir {
		t.Errorf("before it is attached: %+v", s)
	}
	must.Succeed(t, tree.Attach(place))
	want, err := tree.State()
	must.Succeed(t, err)
	must.Succeed(t, tree.Close())
	s := state(t, place)
	if !s.Mounted || s.ID != want.ID || !s.Born.Equal(want.Born) {
		t.Errorf("attached: %+v, want %+v mounted", s, want)
	}
	if _, err := os.Stat(filepath.Join(path, "data")); err != nil {
		t.Error(err)
	}
	table, err := mounts.ReadTable()
	must.Succeed(t, err)
	if m := table.ByID(s.MountID); m == nil || m.Mountpoint != path || mounts.IsShared(m) || len(table.Stack(s.MountID)) != 1 {
		t.Errorf("the table has %+v", m)
	}
	must.Succeed(t, place.Unmount())
	must.Succeed(t, place.Unmount()) // nothing is mounted any more
	if s := state(t, place); s.Mounted {
		t.Errorf("unmounted: %+v", s)
	}
}

func TestMountNewFilesystem(t *testing.T) {
	place, path := newPlace(t)
	tree, err := mounts.New("tmpfs", "source", []string{"ro", "noexec", "size=1m"})
	must.Succeed(t, err)
	if readOnly, err := tree.ReadOnly(); err != nil || !readOnly {
		t.Errorf("read-only %t, %v", readOnly, err)
	}
	must.Succeed(t, tree.Attach(place))
	must.Succeed(t, tree.Close())
	var st unix.Statfs_t
	must.Succeed(t, unix.Statfs(path, &st))
	if bytes := int64(st.Blocks) * st.Bsize; bytes != 1<<20 || st.Flags&unix.ST_NOEXEC == 0 {
		t.Errorf("%d bytes, flags %#x", bytes, st.Flags)
	}
	if _, err := mounts.New("tmpfs", "source", []string{"nonsense"}); !errors.Is(err, mounts.ErrOptions) {
		t.Errorf("an unknown option: %v, want ErrOptions", err)
	}
	if _, err := mounts.New("nonsense", "source", nil); err == nil {
		t.Error("an unknown filesystem was mounted")
	}
}

func TestUnmountKeepsMountInUse(t *testing.T) {
	place, path := newPlace(t)
	tree, err := mounts.New("tmpfs", "source", nil)
	must.Succeed(t, err)
	must.Succeed(t, tree.Attach(place))
	must.Succeed(t, tree.Close())
	user, err := os.Create(filepath.Join(path, "used"))
	must.Succeed(t, err)
	if err := place.Unmount(); !errors.Is(err, mounts.ErrBusy) {
		t.Errorf("unmounted while it is used: %v, want ErrBusy", err)
	}
	must.Succeed(t, user.Close())
	must.Succeed(t, place.Unmount())
}

func TestStackedAndNestedMounts(t *testing.T) {
	place, path := newPlace(t)
	tree, err := mounts.New("tmpfs", "source", nil)
	must.Succeed(t, err)
	must.Succeed(t, tree.Attach(place))
	must.Succeed(t, tree.Close())
	pool := open(t, path)
	volume, err := pool.Make("volume")
	must.Succeed(t, err)
	inside, err := mounts.Clone(volume)
	must.Succeed(t, errors.Join(err, volume.Close()))
	other, _ := newPlace(t)
	must.Succeed(t, inside.Attach(other))
	must.Succeed(t, inside.Close())
	table, err := mounts.ReadTable()
	must.Succeed(t, err)
	below, err := table.MountOf(pool)
	must.Succeed(t, err)
	if found := table.Inside(below); len(found) != 1 || uint64(found[0].ID) != state(t, other).MountID {
		t.Errorf("inside %s are %+v", below.Mountpoint, found)
	}
	must.Succeed(t, other.Unmount())

	over, err := mounts.New("tmpfs", "source", nil)
	must.Succeed(t, err)
	must.Succeed(t, over.Attach(place))
	must.Succeed(t, over.Close())
	table, err = mounts.ReadTable()
	must.Succeed(t, err)
	if count := len(table.Stack(state(t, place).MountID)); count != 2 {
		t.Errorf("%d mounts lie on each other, want 2", count)
	}
	must.Succeed(t, place.Unmount())
}

func TestLinkIsNotFollowed(t *testing.T) {
	place, path := newPlace(t)
	must.Succeed(t, os.Symlink(path, path+"-link"))
	link := mounts.Place{Parent: place.Parent, Name: "place-link"}
	if s := state(t, link); s.IsDir || s.Missing {
		t.Errorf("a link to a directory is %+v, want it not followed", s)
	}
	if s := state(t, mounts.Place{Parent: place.Parent, Name: "none"}); !s.Missing {
		t.Errorf("what is not there is %+v", s)
	}
}

func TestWatch(t *testing.T) {
	place, _ := newPlace(t)
	watch, err := mounts.NewWatch()
	must.Succeed(t, err)
	defer func() { must.Succeed(t, watch.Close()) }()
	tree, err := mounts.New("tmpfs", "source", nil)
	must.Succeed(t, err)
	must.Succeed(t, tree.Attach(place))
	must.Succeed(t, tree.Close())
	began := time.Now()
	must.Succeed(t, watch.Wait(t.Context(), time.Hour))
	if took := time.Since(began); took > time.Minute {
		t.Errorf("a change was reported after %v", took)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := watch.Wait(ctx, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("waiting ended with %v, want Canceled", err)
	}
}

// In a container a pool is mounted at its path, and what the host mounts over it comes on top of that.
func TestOpenCovered(t *testing.T) {
	testenv.NeedRoot(t)
	bare, path := t.TempDir(), t.TempDir()
	id := idOf(t, bare)
	bindHere := func(from string) {
		t.Helper()
		must.Succeed(t, unix.Mount(from, path, "", unix.MS_BIND, ""))
		t.Cleanup(func() { must.Succeed(t, unix.Unmount(path, 0)) })
	}
	bindHere(bare)
	bindHere(t.TempDir())
	bindHere(t.TempDir())
	top := idOf(t, path)
	for range 20 { // whatever thread the goroutine is on
		d, err := mounts.OpenCovered(path, id)
		must.Succeed(t, err)
		got, err := d.ID()
		must.Succeed(t, err, d.Close())
		if got != id {
			t.Fatalf("%v was opened, want %v", got, id)
		}
	}
	if now := idOf(t, path); now != top {
		t.Errorf("at the path is %v now, and was %v", now, top)
	}
	if _, err := mounts.OpenCovered(path, idOf(t, t.TempDir())); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory that is not below: %v", err)
	}
}

func idOf(t *testing.T, path string) dir.ID {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	id, err := d.ID()
	must.Succeed(t, err, d.Close())
	return id
}
