package loop_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// thick makes a file with all of its space.
func thick(t testing.TB, at string, bytes int64) *loop.File {
	t.Helper()
	f, err := loop.Create(open(t, at), "file")
	must.Succeed(t, err)
	t.Cleanup(func() { _ = f.Close() })
	must.Succeed(t, f.Grow(t.Context(), bytes, loop.Thick))
	return f
}

func path(d loop.Device) string { return "/dev/" + d.Name }

// A device of another program whose filesystem does not answer, such as NFS with a dead server,
// must not keep others waiting until it does.
func TestSilentDevice_doesNotDelayOthers(t *testing.T) {
	k := kernel(t)
	hanging, name := ofAnother(t)
	f := thick(t, filesystems["tmpfs"](t), mib)
	other := thick(t, filesystems["tmpfs"](t), mib)
	hanging.Hang()
	var first loop.Device
	for i, file := range []*loop.File{f, other} {
		d := attach(t, k, file, loop.Options{})
		attached, err := k.Attached()
		must.Succeed(t, err)
		if i == 0 {
			first = d
		}
		found := make(map[string]loop.Device)
		for _, d := range attached {
			found[d.Name] = d
		}
		if !found[d.Name].Ours || !found[name].Silent || !found[name].HadPath(filepath.Base(filepath.Dir(hanging.Path)), "disk") {
			t.Errorf("attached are %+v; want %s, and %s as one that is silent", attached, d.Name, name)
		}
	}
	before := hang.Abandoned()
	must.Succeed(t, must.Err(k.Attached()))
	if again := hang.Abandoned() - before; again != 0 {
		t.Errorf("%s was asked again %d times before it had answered", name, again)
	}
	must.Succeed(t, k.Detach(t.Context(), first))
	hanging.Heal()
	awaitAnswer(t, k, name)
}

// A call that waits for a filesystem while it is ended by force gets another error than one that comes
// later: one such device must not hide all others.
func TestInspect_filesystemAbortedMeanwhileIsGone(t *testing.T) {
	k := kernel(t)
	hanging, name := ofAnother(t)
	hanging.Hang()
	answer := make(chan error, 1)
	var gone loop.Device
	go func() {
		var err error
		gone, err = k.Inspect(name)
		answer <- err
	}()
	hanging.AwaitHanging()
	// The device keeps it mounted; all the same it is ended, as umount -f does.
	must.ErrorIs(t, unix.Unmount(filepath.Dir(hanging.Path), unix.MNT_FORCE), unix.EBUSY)
	hanging.Heal()
	must.Succeed(t, <-answer)
	if gone.Silent { // a second passed before the end
		gone = awaitAnswer(t, k, name)
	}
	if !gone.Gone {
		t.Errorf("the device is %+v, want it gone", gone)
	}
}

// ofAnother is a device of another program, whose file is on a disk that can hang.
func ofAnother(t *testing.T) (hanging *disk.Disk, name string) {
	t.Helper()
	image := filepath.Join(t.TempDir(), "image")
	must.Succeed(t, os.WriteFile(image, make([]byte, mib), 0o600))
	hanging = disk.New(t, image, t.TempDir())
	device, err := loopfs.Attach(hanging.Path)
	must.Succeed(t, err)
	t.Cleanup(func() { hanging.Heal(); must.Succeed(t, device.Close()) })
	return hanging, filepath.Base(device.Name())
}

// awaitAnswer waits until a device that was silent reports itself.
func awaitAnswer(t *testing.T, k *loop.Kernel, name string) loop.Device {
	t.Helper()
	for began := time.Now(); ; runtime.Gosched() {
		d, err := k.Inspect(name)
		must.Succeed(t, err)
		if !d.Silent {
			return d
		}
		if time.Since(began) > time.Minute {
			t.Fatalf("%s answers again, and is still %+v", name, d)
		}
	}
}

// It is unknown whether it is the device of the file: there must not be two.
func TestAttach_silentDeviceIsRefused(t *testing.T) {
	k := kernel(t)
	image, at := filepath.Join(t.TempDir(), "image"), filepath.Join(t.TempDir(), "pvc-1")
	must.Succeed(t, os.Mkdir(at, 0o755))
	must.Succeed(t, os.WriteFile(image, make([]byte, mib), 0o600))
	hanging := disk.New(t, image, at)
	device, err := loopfs.Attach(hanging.Path)
	must.Succeed(t, err)
	t.Cleanup(func() {
		hanging.Heal()
		awaitAnswer(t, k, filepath.Base(device.Name()))
		must.Succeed(t, device.Close())
	})
	for name, want := range map[string]error{"pvc-1": loop.ErrSilent, "pvc-2": nil} {
		in := filepath.Join(filesystems["tmpfs"](t), name)
		must.Succeed(t, os.Mkdir(in, 0o755))
		f, err := loop.Create(open(t, in), "disk")
		must.Succeed(t, err)
		t.Cleanup(func() { must.Succeed(t, f.Close()) })
		must.Succeed(t, f.Grow(t.Context(), mib, loop.Thick))
		hanging.Hang()
		d, err := k.Attach(f, loop.Options{})
		if !errors.Is(err, want) {
			t.Errorf("attaching the file of %s: %v, want %v", name, err, want)
		}
		if err == nil {
			must.Succeed(t, k.Detach(t.Context(), d))
		}
	}
}

func TestAttach_directIOBlockSize(t *testing.T) {
	for kind, want := range map[string]int64{"xfs": 512, "ext4": 512, "btrfs": 4096} {
		t.Run(kind, func(t *testing.T) {
			f := thick(t, filesystems[kind](t), mib)
			if got, err := f.BlockBytes(); got != want || err != nil {
				t.Errorf("a block of %d bytes, %v; want %d", got, err, want)
			}
			if got := loop.DeviceBlock(f.ID().Dev); got != 512 {
				t.Errorf("the device's block is %d bytes, want 512", got)
			}
			d := attach(t, kernel(t), f, loop.Options{})
			if d.BlockBytes != want || !d.DirectIO {
				t.Errorf("attached %+v, want direct IO with a block of %d bytes", d, want)
			}
		})
	}
}

// A disk with blocks of 4096 bytes, as many are, allows no direct IO of less.
func TestAttach_diskWithLargeBlocks(t *testing.T) {
	k := kernel(t)
	testenv.NeedPrograms(t, "mkfs.xfs")
	disk := attach(t, k, file(t, open(t, testenv.Tmpfs(t, 512*mib)), "disk", 320*mib), loop.Options{BlockBytes: 4096})
	run(t, "mkfs.xfs", "-q", path(disk))
	at := t.TempDir()
	must.Succeed(t, unix.Mount(path(disk), at, "xfs", 0, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(at, 0)) })

	f := thick(t, at, mib)
	if got, err := f.BlockBytes(); got != 4096 || err != nil {
		t.Errorf("a block of %d bytes, %v; want 4096", got, err)
	}
	if got := loop.DeviceBlock(f.ID().Dev); got != 4096 {
		t.Errorf("the device's block is %d bytes, want 4096", got)
	}
	d, err := k.Attach(f, loop.Options{})
	must.Succeed(t, err)
	if d.BlockBytes != 4096 || !d.DirectIO {
		t.Errorf("attached %+v, want direct IO with a block of 4096 bytes", d)
	}
	must.Succeed(t, k.Detach(t.Context(), d))
	// Whose content was made for a smaller block goes without direct IO.
	d, err = k.Attach(f, loop.Options{BlockBytes: 512})
	must.Succeed(t, err)
	if d.BlockBytes != 512 || d.DirectIO {
		t.Errorf("attached %+v, want a block of 512 bytes without direct IO", d)
	}
	must.Succeed(t, k.Detach(t.Context(), d))
}

// A process that was killed while it detached leaves one that refuses discards.
func TestAttach_deviceRefusingDiscardsIsNotReused(t *testing.T) {
	k := kernel(t)
	root := open(t, testenv.Tmpfs(t, 64*mib))
	d, err := k.Attach(file(t, root, "a", mib), loop.Options{})
	must.Succeed(t, err)
	end(t, d.Name) // which does not remove it
	if d := attach(t, k, file(t, root, "b", mib), loop.Options{Discard: true}); !d.Discard {
		t.Errorf("attached %+v, want one that takes discards", d)
	}
}

// Kubelet attaches one to each block device, to keep it open.
func TestDetach_loopDeviceOnTopIsBusy(t *testing.T) {
	k := kernel(t)
	k.SetPause(func(context.Context, time.Duration) error { return nil })
	f := file(t, open(t, testenv.Tmpfs(t, 64*mib)), "a", mib)
	d := attach(t, k, f, loop.Options{})
	losetup(t, path(d)) // ends before ours is detached
	var node unix.Stat_t
	must.Succeed(t, unix.Stat(path(d), &node))
	all, err := k.Attached()
	must.Succeed(t, err)
	devices := make(map[dir.ID]int)
	for _, other := range all {
		devices[other.Backing]++
	}
	if devices[dir.ID{Dev: node.Dev, Ino: node.Ino}] != 1 || devices[f.ID()] != 1 {
		t.Errorf("devices by what they are attached to: %v, want one on the node and one on the file", devices)
	}
	must.ErrorIs(t, k.Detach(t.Context(), d), loop.ErrBusy)
	if again, err := k.Attach(f, loop.Options{}); again != d || err != nil {
		t.Errorf("attached %+v, %v; want %+v", again, err, d)
	}
}

func TestAttach_retriesTakenDevice(t *testing.T) {
	k := kernel(t)
	root := open(t, testenv.Tmpfs(t, 64*mib))
	taken := attach(t, k, file(t, root, "taken", mib), loop.Options{})
	tries := 0
	k.SetFree(func(next func() (int, error)) (int, error) {
		if tries++; tries == 1 {
			return int(taken.Minor), nil // another process was faster
		}
		return next()
	})
	if d := attach(t, k, file(t, root, "a", mib), loop.Options{}); d.Name == taken.Name || tries != 2 {
		t.Errorf("attached %+v after %d tries", d, tries)
	}

	tries = 0
	k.SetFree(func(func() (int, error)) (int, error) { tries++; return int(taken.Minor), nil })
	_, err := k.Attach(file(t, root, "b", mib), loop.Options{})
	must.ErrorIs(t, err, loop.ErrNoDevice)
	if tries != loop.Attempts {
		t.Errorf("%d tries, want %d", tries, loop.Attempts)
	}
}

// The kernel would offer it again and again.
func TestAttach_skipsHeldFreeDevice(t *testing.T) {
	k := kernel(t)
	root := open(t, testenv.Tmpfs(t, 64*mib))
	var held *os.File
	defer func() { held.Close() }()
	k.SetFree(func(next func() (int, error)) (int, error) {
		number, err := next()
		if held == nil && err == nil {
			held, err = os.OpenFile(fmt.Sprintf("/dev/loop%d", number), os.O_RDONLY|unix.O_EXCL, 0)
		}
		return number, err
	})
	d := attach(t, k, file(t, root, "a", mib), loop.Options{})
	if held == nil || path(d) == held.Name() {
		t.Errorf("attached %+v, which is held", d)
	}
}

// A process that has ended its device keeps the descriptor of it on older kernels, as Linux 6.1: a pod can have given it to another.
func TestAttach_openFreeDeviceIsPassedBy(t *testing.T) {
	k := kernel(t)
	root := open(t, testenv.Tmpfs(t, 64*mib))
	control, err := os.Open("/dev/loop-control")
	must.Succeed(t, err)
	defer control.Close()
	number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	must.Succeed(t, err)
	held, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", number), os.O_RDWR, 0)
	must.Succeed(t, err)
	defer held.Close()
	for _, name := range []string{"a", "b"} {
		d := attach(t, k, file(t, root, name, mib), loop.Options{})
		must.Succeed(t, os.WriteFile(path(d), []byte("secret"), 0))
		seen := make([]byte, 6)
		if _, err := held.ReadAt(seen, 0); string(seen) == "secret" {
			t.Errorf("%s shows a file that was attached to %s while it was open: %v", held.Name(), d.Name, err)
		}
	}
}

func TestAttach_noDeviceLeft(t *testing.T) {
	must.ErrorIs(t, loop.NoDevice(unix.ENOSPC), loop.ErrNoDevice)
	if err := loop.NoDevice(unix.EPERM); errors.Is(err, loop.ErrNoDevice) || !errors.Is(err, unix.EPERM) {
		t.Errorf("error %v, want EPERM", err)
	}
}

func TestDetach_waitsForShortOpens(t *testing.T) {
	k := kernel(t)
	f := file(t, open(t, testenv.Tmpfs(t, 64*mib)), "a", mib)
	d := attach(t, k, f, loop.Options{})
	for _, flags := range []int{os.O_RDONLY, os.O_RDONLY | unix.O_EXCL} {
		looker, err := os.OpenFile(path(d), flags, 0)
		must.Succeed(t, err)
		pauses := 0
		k.SetPause(func(context.Context, time.Duration) error {
			if pauses++; pauses == 3 {
				return looker.Close()
			}
			return nil
		})
		must.Succeed(t, k.Detach(t.Context(), d))
		// More where another program on the machine opens it too.
		if pauses < 3 {
			t.Errorf("%d pauses, want 3", pauses)
		}
		if _, err := k.Inspect(d.Name); err == nil {
			t.Error("it is still attached")
		}
		d = attach(t, k, f, loop.Options{})
	}
}

// Whenever it is asked a process has it open, but not in between.
func TestDetach_goesBetweenShortOpens(t *testing.T) {
	k := kernel(t)
	d := attach(t, k, file(t, open(t, testenv.Tmpfs(t, 64*mib)), "a", mib), loop.Options{})
	looker, err := os.Open(path(d))
	must.Succeed(t, err)
	k.SetPause(func(context.Context, time.Duration) (err error) {
		must.Succeed(t, looker.Close())
		looker, err = os.Open(path(d))
		if errors.Is(err, unix.ENXIO) {
			err = nil // it is gone, or free
		}
		return err
	})
	must.Succeed(t, k.Detach(t.Context(), d))
	_ = looker.Close()
	if _, err := k.Inspect(d.Name); !errors.Is(err, loop.ErrNotAttached) {
		t.Errorf("the device: %v, want it detached", err)
	}
}

func TestDetach_contextCancelled(t *testing.T) {
	k := kernel(t)
	d := attach(t, k, file(t, open(t, testenv.Tmpfs(t, 64*mib)), "a", mib), loop.Options{})
	release := hold(t, d)
	defer release()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must.ErrorIs(t, k.Detach(ctx, d), loop.ErrBusy)
	if got, err := k.Inspect(d.Name); got != d || err != nil {
		t.Errorf("the device is %+v, %v; want %+v", got, err, d)
	}
}

func TestDetach_mountedIsBusy(t *testing.T) {
	k := kernel(t)
	testenv.NeedPrograms(t, "mkfs.ext4")
	f := file(t, open(t, testenv.Tmpfs(t, 64*mib)), "a", 16*mib)
	d := attach(t, k, f, loop.Options{})
	k.SetPause(func(context.Context, time.Duration) error { return nil })
	run(t, "mkfs.ext4", "-q", path(d))
	at := t.TempDir()
	must.Succeed(t, unix.Mount(path(d), at, "ext4", 0, ""))
	mounted := true
	unmount := func() {
		if mounted {
			must.Succeed(t, unix.Unmount(at, 0))
			mounted = false
		}
	}
	t.Cleanup(unmount)
	must.ErrorIs(t, k.Detach(t.Context(), d), loop.ErrBusy)
	if got, err := k.Inspect(d.Name); got != d || err != nil {
		t.Errorf("the device is %+v, %v; want %+v", got, err, d)
	}
	// As losetup --detach leaves it.
	end(t, d.Name)
	if kept, err := k.Attach(f, loop.Options{}); err != nil && !errors.Is(err, loop.ErrBusy) || err == nil && kept != d {
		t.Errorf("attached %+v, %v; want %+v or ErrBusy", kept, err, d)
	}
	unmount()
}

func TestInspect_partOfFileIsNotOurs(t *testing.T) {
	k := kernel(t)
	f := file(t, open(t, testenv.Tmpfs(t, 64*mib)), "a", mib)
	d := attach(t, k, f, loop.Options{})
	opened, err := os.Open(path(d))
	must.Succeed(t, err)
	defer opened.Close()
	info, err := unix.IoctlLoopGetStatus64(int(opened.Fd()))
	must.Succeed(t, err)
	whole := *info
	info.Offset = 4096
	must.Succeed(t, unix.IoctlLoopSetStatus64(int(opened.Fd()), info))
	if got, err := k.Inspect(d.Name); got.Ours || err != nil {
		t.Errorf("the device is %+v, %v; want one that is not ours", got, err)
	}
	must.Succeed(t, unix.IoctlLoopSetStatus64(int(opened.Fd()), &whole))
}

func TestOtherFilesAreRefused(t *testing.T) {
	testenv.NeedRoot(t)
	at := testenv.Tmpfs(t, 64*mib)
	must.Succeed(t, os.WriteFile(filepath.Join(at, "file"), nil, 0o600))
	must.Succeed(t, unix.Mkfifo(filepath.Join(at, "pipe"), 0o600))
	must.Succeed(t, os.Symlink("/dev/loop0", filepath.Join(at, "link")))
	must.Succeed(t, unix.Mknod(filepath.Join(at, "null"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
	k := loop.NewKernel(open(t, at))
	for _, name := range []string{"file", "pipe", "link", "null", "../dev/null", ""} {
		if d, err := k.Inspect(name); err == nil || errors.Is(err, loop.ErrNotAttached) {
			t.Errorf("Inspect(%q) = %+v, %v; want another error", name, d, err)
		}
		if err := k.Detach(t.Context(), loop.Device{Name: name}); err == nil {
			t.Errorf("Detach(%q): no error", name)
		}
		if _, err := k.Grow(loop.Device{Name: name}); err == nil {
			t.Errorf("Grow(%q): no error", name)
		}
	}
}

func TestAttached_deadFilesystem(t *testing.T) {
	k := kernel(t)
	alive := attach(t, k, file(t, open(t, testenv.Tmpfs(t, 64*mib)), "a", mib), loop.Options{})
	at := open(t, testenv.LoopFS(t, "xfs", 320*mib))
	d, err := k.Attach(file(t, at, "a", mib), loop.Options{})
	must.Succeed(t, err)
	t.Cleanup(func() {
		if _, err := k.Inspect(d.Name); !errors.Is(err, loop.ErrNotAttached) {
			end(t, d.Name)
		}
	})
	const goingDown, withoutFlush = 0x8004587d, 2 // XFS_IOC_GOINGDOWN
	must.Succeed(t, unix.IoctlSetPointerInt(at.Fd(), goingDown, withoutFlush))

	all, err := k.Attached()
	must.Succeed(t, err)
	seen := make(map[string]bool)
	for _, other := range all {
		seen[other.Name] = true
	}
	if !seen[alive.Name] || seen[d.Name] {
		t.Errorf("attached are %v, want %s and not %s", seen, alive.Name, d.Name)
	}
	// What was known of it before is no reason to detach what it may be now.
	must.ErrorIs(t, k.Detach(t.Context(), d), loop.ErrGone)
	gone, err := k.Inspect(d.Name)
	must.Succeed(t, err)
	if !gone.Gone || gone.Ours || gone.FormerPath != filepath.Join(at.String(), "a") || gone.Minor != d.Minor {
		t.Errorf("the device is %+v, want it gone, and was %+v", gone, d)
	}
	must.Succeed(t, k.Detach(t.Context(), loop.Device{Name: d.Name, Gone: true, FormerPath: "/another"}))
	_, err = k.Grow(gone)
	must.ErrorIs(t, err, loop.ErrNotAttached)
	// It goes with its last user.
	release := hold(t, d)
	must.Succeed(t, k.Detach(t.Context(), gone))
	release()
	_, err = k.Inspect(d.Name)
	must.ErrorIs(t, err, loop.ErrNotAttached)
}

// A container's own /dev is a tmpfs with copies from its start.
func TestCheckNodes(t *testing.T) {
	testenv.NeedRoot(t)
	must.Succeed(t, kernel(t).CheckNodes())
	bound := t.TempDir()
	must.Succeed(t, unix.Mount("/dev", bound, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(bound, unix.MNT_DETACH)) })
	own := testenv.Tmpfs(t, 1<<20)
	must.Succeed(t, unix.Mknod(own+"/loop-control", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 237))))
	for path, want := range map[string]error{bound: nil, own: loop.ErrNodes, t.TempDir(): loop.ErrNodes} {
		dev, err := dir.Open(path)
		must.Succeed(t, err)
		if err := loop.NewKernel(dev).CheckNodes(); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", path, err, want)
		} else if want != nil && !strings.Contains(err.Error(), "mount the host's /dev into the driver's container") {
			t.Errorf("%v does not say which mount is missing", err)
		}
		must.Succeed(t, dev.Close())
	}
}

// Such is the /dev of a container that was not given the host's.
func TestMissingNodesAreAnError(t *testing.T) {
	hosts := kernel(t)
	f := file(t, open(t, testenv.Tmpfs(t, 64*mib)), "a", mib)
	k := loop.NewKernel(open(t, t.TempDir()))
	_, err := k.Attach(f, loop.Options{})
	must.ErrorIs(t, err, fs.ErrNotExist)
	d := attach(t, hosts, f, loop.Options{})
	// A device of which nothing can be known might be ours.
	_, err = k.Attached()
	must.ErrorIs(t, err, fs.ErrNotExist)
	_, err = k.Inspect(d.Name)
	must.ErrorIs(t, err, fs.ErrNotExist)
}
