package blockdev_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(threadVariable); path != "" {
		inThread(path, os.Getenv(howVariable) != "on its own")
	}
	testenv.Main(m)
}

const mib = 1 << 20

// attach makes a loop device of a file that is full of a byte.
func attach(t *testing.T, size int, content byte) (path string, device blockdev.Device) {
	t.Helper()
	testenv.NeedRoot(t)
	image := filepath.Join(t.TempDir(), "disk")
	must.Succeed(t, os.WriteFile(image, bytes.Repeat([]byte{content}, size), 0o600))
	loop, err := loopfs.Attach(image)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, loop.Close()) })
	device, err = blockdev.Find(loop.Name())
	must.Succeed(t, err)
	return loop.Name(), device
}

func TestFind(t *testing.T) {
	path, device := attach(t, 8*mib, 0)
	link := filepath.Join(t.TempDir(), "link")
	must.Succeed(t, os.Symlink(path, link))
	linked, err := blockdev.Find(link)
	must.Succeed(t, err)
	if linked.Number() != device.Number() || linked.Path() != link {
		t.Errorf("by a link it is %s, want %s", linked, device)
	}
	if size, err := device.SizeBytes(); err != nil || size != 8*mib {
		t.Errorf("size %d, %v", size, err)
	}
	if name, err := device.HostName(); err != nil || name != path {
		t.Errorf("the host knows it as %q, %v; want %s", name, err, path)
	}
	if _, err := blockdev.Find("/dev/null"); !errors.Is(err, blockdev.ErrNotBlock) {
		t.Errorf("/dev/null: %v, want ErrNotBlock", err)
	}
	if _, err := blockdev.Find(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing: %v, want ErrNotExist", err)
	}
}

func TestNode(t *testing.T) {
	_, device := attach(t, mib, 0)
	at := filepath.Join(t.TempDir(), "mapper", "name")
	for range 2 { // the second finds the node of the first
		must.Succeed(t, device.Node(at))
	}
	if made, err := blockdev.Find(at); err != nil || made.Number() != device.Number() {
		t.Errorf("made %s, %v; want %s", made, err, device)
	}
	other := filepath.Join(t.TempDir(), "file")
	must.Succeed(t, os.WriteFile(other, nil, 0o600))
	if err := device.Node(other); !errors.Is(err, fs.ErrExist) {
		t.Errorf("where a file is: %v, want ErrExist", err)
	}
}

func TestCheckUnused(t *testing.T) {
	path, device := attach(t, mib, 'x')
	must.Succeed(t, device.CheckUnused())
	user, err := unix.Open(path, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	must.Succeed(t, err)
	if err := device.CheckUnused(); !errors.Is(err, blockdev.ErrBusy) {
		t.Errorf("held: %v, want ErrBusy", err)
	}
	if err := device.Erase(); !errors.Is(err, blockdev.ErrBusy) {
		t.Errorf("blanked while it is held: %v, want ErrBusy", err)
	}
	must.Succeed(t, unix.Close(user))
	must.Succeed(t, device.CheckUnused())
	if b, err := device.ByteAt(0); err != nil || b != 'x' {
		t.Errorf("the first byte is %q, %v; want it kept", b, err)
	}
}

func TestStartsBlank(t *testing.T) {
	_, device := attach(t, 8*mib, 'x')
	if blank, err := device.StartsBlank(); err != nil || blank {
		t.Errorf("data: blank %t, %v", blank, err)
	}
	must.Succeed(t, device.Erase())
	if blank, err := device.StartsBlank(); err != nil || !blank {
		t.Errorf("after Erase: blank %t, %v", blank, err)
	}
	for offset, want := range map[int64]byte{mib - 1: 0, mib: 'x'} {
		if b, err := device.ByteAt(offset); err != nil || b != want {
			t.Errorf("byte %d is %q, %v; want %q", offset, b, err, want)
		}
	}
	_, tiny := attach(t, 512, 0)
	if _, err := tiny.StartsBlank(); err == nil {
		t.Error("a device of 512 bytes is no error")
	}
}

// What is on a device may begin anywhere.
func TestBlank(t *testing.T) {
	path, device := attach(t, 56*mib, 0)
	if blank, err := device.Blank(t.Context()); err != nil || !blank {
		t.Errorf("zeroes: blank %t, %v", blank, err)
	}
	for _, at := range []int64{0, 16*mib - 1, 56*mib - 1, 40 * mib, blockdev.Samples(56 * mib)[100].From} {
		disk := must.Value(os.OpenFile(path, os.O_RDWR, 0))(t)
		for _, content := range []string{"x", "\x00"} {
			must.Value(disk.WriteAt([]byte(content), at))(t)
			must.Succeed(t, disk.Sync())
			if blank, err := device.Blank(t.Context()); err != nil || blank != (content == "\x00") {
				t.Errorf("byte %d is %q: blank %t, %v", at, content, blank, err)
			}
		}
		must.Succeed(t, disk.Close())
	}
}

func TestInstance(t *testing.T) {
	_, first := attach(t, mib, 0)
	_, second := attach(t, mib, 0)
	a, err := first.Instance()
	must.Succeed(t, err)
	again, err := first.Instance()
	must.Succeed(t, err)
	b, err := second.Instance()
	must.Succeed(t, err)
	if a != again || a == b {
		t.Errorf("instances %q, %q of one device, %q of another", a, again, b)
	}
}
