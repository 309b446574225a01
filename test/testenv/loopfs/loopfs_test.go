package loopfs_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

func TestMain(m *testing.M) { testenv.Main(m) }

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
