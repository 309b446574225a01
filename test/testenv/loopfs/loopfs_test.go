package loopfs_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const size = 512 << 20

func TestMountCleansUp(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			testenv.NeedRoot(t)
			parent := t.TempDir()
			dir := filepath.Join(parent, "fs")
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			mount(t, dir, kind, size)
			wantRoughly(t, dir, size)
			wantNames(t, parent, "fs")
			if got := loopDevices(t, parent); len(got) != 1 {
				t.Errorf("loop devices on a file of %s: %q, want one", parent, got)
			}
			if err := loopfs.Unmount(dir); err != nil {
				t.Error(err)
			}
			if got := leftDevices(t, parent); len(got) != 0 {
				t.Errorf("loop devices left behind: %q", got)
			}
		})
	}
}

func TestUnmountBusyFilesystem(t *testing.T) {
	testenv.NeedRoot(t)
	dir := t.TempDir()
	mount(t, dir, "ext4", 16<<20)
	file, err := os.Create(filepath.Join(dir, "busy"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := loopfs.Unmount(dir); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("Unmount = %v, want EBUSY", err)
	}
	wantNames(t, dir)
}

func TestDetach(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "losetup")
	pool, other := t.TempDir(), t.TempDir()
	for _, dir := range []string{pool, other} {
		attach(t, filepath.Join(dir, "disk"))
		t.Cleanup(func() {
			if err := loopfs.Detach(dir); err != nil {
				t.Error(err)
			}
		})
	}
	busy, err := os.Open(loopDevices(t, pool)[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := loopfs.Detach(pool); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("Detach = %v of a device that is in use, want EBUSY", err)
	}
	if err := busy.Close(); err != nil {
		t.Fatal(err)
	}
	if err := loopfs.Detach(pool); err != nil {
		t.Error(err)
	}
	if got := loopDevices(t, pool); len(got) != 0 {
		t.Errorf("still attached: %q", got)
	}
	if got := loopDevices(t, other); len(got) != 1 {
		t.Errorf("of another directory %q are attached, want one", got)
	}
}

// A program that opens all devices has this one open too.
func TestDetachWaitsForOpenDevice(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "losetup")
	dir := t.TempDir()
	attach(t, filepath.Join(dir, "disk"))
	opened, err := os.Open(loopDevices(t, dir)[0])
	must.Succeed(t, err)
	closed := make(chan error, 1)
	time.AfterFunc(100*time.Millisecond, func() { closed <- opened.Close() })
	if err := loopfs.Detach(dir); err != nil {
		t.Error(err)
	}
	must.Succeed(t, <-closed)
	if got := loopDevices(t, dir); len(got) != 0 {
		t.Errorf("still attached: %q", got)
	}
}

func TestLeftWaitsForOpenDevice(t *testing.T) {
	testenv.NeedRoot(t)
	parent := t.TempDir()
	image, err := loopfs.Format(t.Context(), parent, "ext4", 16<<20)
	must.Succeed(t, err)
	device, err := loopfs.Attach(image)
	must.Succeed(t, err)
	if got := leftDevices(t, parent); len(got) != 1 {
		t.Errorf("left are %q of one that stays", got)
	}
	closed := make(chan error, 1)
	time.AfterFunc(100*time.Millisecond, func() { closed <- device.Close() })
	if got := leftDevices(t, parent); len(got) != 0 {
		t.Errorf("left are %q of one that goes", got)
	}
	must.Succeed(t, <-closed)
}

func attach(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if output, err := exec.CommandContext(t.Context(), "losetup", "--find", path).CombinedOutput(); err != nil {
		t.Fatalf("losetup: %v: %s", err, output)
	}
}

func TestMountReportsMissingProgram(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	parent := t.TempDir()
	err := loopfs.Mount(t.Context(), filepath.Join(parent, "fs"), "xfs", size)
	if !errors.Is(err, loopfs.ErrMissing) || !strings.Contains(err.Error(), "mkfs.xfs") {
		t.Errorf("Mount without programs = %v", err)
	}
	wantNames(t, parent)
}

func TestMountRefusesUnknownFilesystem(t *testing.T) {
	err := loopfs.Mount(t.Context(), t.TempDir(), "ntfs", size)
	if err == nil || errors.Is(err, loopfs.ErrMissing) {
		t.Errorf("Mount of ntfs = %v, want an error that is not ErrMissing", err)
	}
}

func mount(t *testing.T, dir, kind string, bytes int64) {
	t.Helper()
	err := loopfs.Mount(t.Context(), dir, kind, bytes)
	if errors.Is(err, loopfs.ErrMissing) {
		testenv.Missing(t, err.Error())
	}
	if err != nil {
		t.Fatal(err)
	}
}

func wantRoughly(t *testing.T, dir string, bytes uint64) {
	t.Helper()
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil {
		t.Fatal(err)
	}
	if got := fs.Blocks * uint64(fs.Bsize); got < bytes*3/4 || got > bytes {
		t.Errorf("%s has %d bytes, want nearly %d", dir, got, bytes)
	}
}

func wantNames(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, entry := range entries {
		got = append(got, entry.Name())
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("%s holds %q, want %q", dir, got, want)
	}
}

func loopDevices(t *testing.T, dir string) []string {
	t.Helper()
	found, err := loopfs.Devices(dir)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func leftDevices(t *testing.T, dir string) []string {
	t.Helper()
	left, err := loopfs.Left(dir)
	must.Succeed(t, err)
	return left
}

func TestMountDevice(t *testing.T) {
	testenv.NeedRoot(t)
	parent, dir := t.TempDir(), t.TempDir()
	image, err := loopfs.Format(t.Context(), parent, "ext4", 16<<20, "-N", "64")
	must.Succeed(t, err)
	device, err := loopfs.Attach(image)
	must.Succeed(t, err)
	must.Succeed(t, os.Remove(image))
	for range 2 {
		must.Succeed(t, loopfs.MountDevice(t.Context(), device.Name(), dir, "ext4", "nodev"))
		names, err := filepath.Glob(filepath.Join(dir, "kept-*"))
		must.Succeed(t, err)
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "kept-"+strings.Repeat("x", len(names))), nil, 0o600))
		if len(names) == 1 {
			break
		}
		must.Succeed(t, loopfs.Unmount(dir))
		if got := loopDevices(t, parent); len(got) != 1 {
			t.Errorf("the devices of what is not mounted are %q, want one", got)
		}
	}
	wantNames(t, dir, "kept-", "kept-x", "lost+found")
	var fs syscall.Statfs_t
	must.Succeed(t, syscall.Statfs(dir, &fs))
	if fs.Files > 128 {
		t.Errorf("%d inodes, and few were asked for", fs.Files)
	}
	must.Succeed(t, device.Close())
	must.Succeed(t, loopfs.Unmount(dir))
	if got := leftDevices(t, parent); len(got) != 0 {
		t.Errorf("loop devices left behind: %q", got)
	}
}
