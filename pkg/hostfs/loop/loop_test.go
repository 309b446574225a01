package loop_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestFakeContract(t *testing.T) {
	looptest.Contract(t, func(t *testing.T) looptest.Subject {
		dev := open(t, t.TempDir())
		fake := looptest.NewFake(dev)
		t.Cleanup(func() { must.Succeed(t, fake.Close()) })
		return looptest.Subject{
			Devices: fake,
			Root:    open(t, t.TempDir()),
			Dev:     dev,
			Again:   func(*testing.T) looptest.Devices { return fake },
			Foreign: func(t *testing.T, f *loop.File, readOnly bool) loop.Device {
				d, err := fake.AttachForeign(f, readOnly)
				must.Succeed(t, err)
				return d
			},
			Hold: func(t *testing.T, d loop.Device) func() {
				release, err := fake.Hold(d.Name)
				must.Succeed(t, err)
				return release
			},
			End:   func(t *testing.T, d loop.Device) { must.Succeed(t, fake.End(d.Name)) },
			Alter: func(t *testing.T, d loop.Device) { must.Succeed(t, fake.Alter(d.Name)) },
		}
	})
}

func TestKernelContract(t *testing.T) {
	testenv.NeedRoot(t)
	for name, mount := range filesystems {
		t.Run(name, func(t *testing.T) {
			mounted := mount(t)
			looptest.Contract(t, func(t *testing.T) looptest.Subject {
				root := filepath.Join(mounted, filepath.Base(t.TempDir())+filepath.Base(t.Name()))
				must.Succeed(t, os.Mkdir(root, 0o700))
				t.Cleanup(func() { must.Succeed(t, os.RemoveAll(root)) })
				dev := open(t, "/dev")
				return looptest.Subject{
					Devices: loop.NewKernel(dev),
					Root:    open(t, root),
					Dev:     dev,
					Again:   func(*testing.T) looptest.Devices { return loop.NewKernel(dev) },
					Foreign: foreign,
					Hold:    hold,
					End:     func(t *testing.T, d loop.Device) { end(t, d.Name) },
					Alter:   alter,
				}
			})
		})
	}
}

const mib = 1 << 20

// filesystems are mounted until the test ends.
var filesystems = map[string]func(t testing.TB) string{
	"tmpfs": func(t testing.TB) string { return testenv.Tmpfs(t, 256*mib) },
	"xfs":   func(t testing.TB) string { return testenv.LoopFS(t, "xfs", 320*mib) },
	"ext4":  func(t testing.TB) string { return testenv.LoopFS(t, "ext4", 320*mib) },
	"btrfs": func(t testing.TB) string { return testenv.LoopFS(t, "btrfs", 320*mib) },
	"btrfs subvolume": func(t testing.TB) string {
		testenv.NeedPrograms(t, "btrfs")
		path := filepath.Join(testenv.LoopFS(t, "btrfs", 320*mib), "subvolume")
		run(t, "btrfs", "subvolume", "create", path)
		return path
	},
}

// foreign attaches as another program does.
func foreign(t *testing.T, f *loop.File, readOnly bool) loop.Device {
	t.Helper()
	var options []string
	if readOnly {
		options = []string{"--read-only"}
	}
	name := losetup(t, strings.Replace(f.HandlePath(), "self", strconv.Itoa(os.Getpid()), 1), options...)
	d, err := loop.NewKernel(open(t, "/dev")).Inspect(name)
	must.Succeed(t, err)
	return d
}

// losetup attaches a file by losetup(8), until the test ends.
func losetup(t *testing.T, path string, options ...string) (name string) {
	t.Helper()
	testenv.NeedPrograms(t, "losetup")
	cmd := exec.CommandContext(t.Context(), "losetup", append(options, "--find", "--show", path)...)
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("losetup: %v: %s", err, output)
	}
	name = filepath.Base(strings.TrimSpace(string(output)))
	t.Cleanup(func() { end(t, name) })
	return name
}

func hold(t *testing.T, d loop.Device) func() {
	t.Helper()
	f, err := os.Open("/dev/" + d.Name)
	must.Succeed(t, err)
	return func() { must.Succeed(t, f.Close()) }
}

func end(t *testing.T, name string) {
	t.Helper()
	f, err := os.Open("/dev/" + name)
	must.Succeed(t, err)
	defer f.Close()
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		t.Error(err)
	}
}

// alter changes a device as one does who has it open for writing, and no capability.
func alter(t *testing.T, d loop.Device) {
	t.Helper()
	f, err := os.OpenFile("/dev/"+d.Name, os.O_RDWR, 0)
	must.Succeed(t, err)
	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	must.Succeed(t, err)
	info.File_name, info.Offset = [unix.LO_NAME_SIZE]uint8{}, loop.Unit
	must.Succeed(t, unix.IoctlLoopSetStatus64(int(f.Fd()), info))
}

// file makes a thin file, which is closed when the test ends.
func file(t testing.TB, d *dir.Dir, name string, bytes int64) *loop.File {
	t.Helper()
	f, err := loop.Create(d, name)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = f.Close() })
	must.Succeed(t, f.Grow(t.Context(), bytes, loop.Thin))
	return f
}

// attach attaches until the test ends.
func attach(t testing.TB, k *loop.Kernel, f *loop.File, o loop.Options) loop.Device {
	t.Helper()
	d, err := k.Attach(f, o)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, k.Detach(context.WithoutCancel(t.Context()), d)) })
	return d
}

func kernel(t testing.TB) *loop.Kernel {
	t.Helper()
	testenv.NeedRoot(t)
	return loop.NewKernel(open(t, "/dev"))
}

func open(t testing.TB, path string) *dir.Dir {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func run(t testing.TB, args ...string) {
	t.Helper()
	if output, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", args[0], err, output)
	}
}
