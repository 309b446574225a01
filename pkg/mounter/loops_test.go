package mounter_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/mounter"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// poolOn is a mounter whose pool is mounted from a filesystem of a kind, with a directory for a volume as the driver makes it.
func poolOn(t *testing.T, kind string) (m *mounter.Mounter, volume string) {
	t.Helper()
	m, _ = newMounter(t)
	if kind != "tmpfs" {
		m.Claim = mounter.Volume{Path: testenv.LoopFS(t, kind, 300*mib)}
	}
	must.Succeed(t, m.Mount(t.Context()))
	volume = filepath.Join(m.Target, "pvc-1")
	if kind != "btrfs" {
		must.Succeed(t, os.Mkdir(volume, 0o755))
		return m, volume
	}
	if said, err := exec.CommandContext(t.Context(), "btrfs", "subvolume", "create", volume).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	return m, volume
}

// A block volume is published, and the container of the driver has ended through whose mount its file was attached: umount(2) does not see it any
// more. The pool stays mounted, and its mounter at work.
func TestPoolUnderBlockVolumeStays(t *testing.T) {
	for _, kind := range []string{"tmpfs", "ext4", "xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			m, volume := poolOn(t, kind)
			t.Cleanup(func() { _ = unix.Unmount(m.Target, 0) }) // it is not mounted any more unless the test failed
			detach := attachInContainer(t, volume)
			look := *m
			look.Claim = nil
			must.ErrorIs(t, look.Look(t.Context()), mounter.ErrInUse)
			must.ErrorIs(t, look.Unmount(t.Context()), mounter.ErrInUse)
			must.ErrorIs(t, m.Unmount(t.Context()), mounter.ErrInUse)
			must.Succeed(t, m.Check(), unix.Unmount(m.Target, 0))
			must.ErrorIs(t, m.Unmount(t.Context()), mounter.ErrInUse) // unmounted by an administrator
			detach()
			must.Succeed(t, look.Look(t.Context()), m.Unmount(t.Context()))
		})
	}
}

// The filesystem of a pool failed, or does not say what the file of a device is. The kernel's name of that, which needs no filesystem, is that of
// one in the pool, or may be. What the error says to detach the device with helps.
func TestPoolUnderSilentBlockVolumeStays(t *testing.T) {
	for name, pool := range map[string]func(t *testing.T) *mounter.Mounter{"failed": failedPool, "silent": silentPool} {
		t.Run(name, func(t *testing.T) {
			m := pool(t)
			t.Cleanup(func() { _ = unix.Unmount(m.Target, 0) })
			look := *m
			look.Claim = nil
			command := ""
			for _, err := range []error{look.Look(t.Context()), look.Unmount(t.Context()), m.Unmount(t.Context())} {
				must.ErrorIs(t, err, mounter.ErrInUse)
				command = regexp.MustCompile(`losetup --detach /dev/loop\d+$`).FindString(err.Error())
			}
			if said, err := exec.CommandContext(t.Context(), "sh", "-c", command).CombinedOutput(); err != nil || command == "" {
				t.Fatalf("%q: %v: %s", command, err, said)
			}
			m.Patience = time.Minute // for those that open each device for an instant
			must.Succeed(t, m.Unmount(t.Context()))
		})
	}
}

func failedPool(t *testing.T) *mounter.Mounter {
	t.Helper()
	m, volume := poolOn(t, "xfs")
	attachInContainer(t, volume)
	testenv.ShutDown(t, m.Target)
	return m
}

func silentPool(t *testing.T) *mounter.Mounter {
	t.Helper()
	m, _ := newMounter(t)
	claim := poolOfServer(t)
	m.Claim = mounter.Volume{Path: filepath.Dir(claim.Path)}
	must.Succeed(t, m.Mount(t.Context()))
	attachThrough(t, m.Target, filepath.Base(claim.Path))
	claim.FailWith(unix.EACCES, disk.Stat)
	t.Cleanup(claim.Heal)
	return m
}

// poolOfServer is a filesystem, with a file, that tells neither its id nor when its root was made, as one of the network.
func poolOfServer(t *testing.T) *disk.Disk {
	t.Helper()
	image := filepath.Join(t.TempDir(), "image")
	must.Succeed(t, os.WriteFile(image, nil, 0o600), os.Truncate(image, mib))
	return disk.New(t, image, t.TempDir())
}

// The pool is a directory of a filesystem that has other files, too.
func TestLoopDevicesBesidePoolDoNotCount(t *testing.T) {
	m, claim := newMounter(t)
	whole := testenv.LoopFS(t, "ext4", 300*mib)
	pool, beside := filepath.Join(whole, "pool"), filepath.Join(whole, "beside")
	must.Succeed(t, os.MkdirAll(filepath.Join(pool, "pvc-1"), 0o755), os.Mkdir(beside, 0o755))
	must.Succeed(t, unix.Mount(pool, claim, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(claim, unix.MNT_DETACH)) })
	must.Succeed(t, m.Mount(t.Context()))
	attachInContainer(t, beside)
	must.Succeed(t, m.Unmount(t.Context()), m.Mount(t.Context()))
	detach := attachInContainer(t, filepath.Join(m.Target, "pvc-1"))
	must.ErrorIs(t, m.Unmount(t.Context()), mounter.ErrInUse)
	detach()
	must.Succeed(t, m.Unmount(t.Context()), m.Mount(t.Context()))

	// Unmounted by an administrator, and the container sees the files beside it at the paths that the node has.
	t.Chdir("/")
	visible, err := loopfs.Attach(filepath.Join(beside, "disk.img"))
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, visible.Close()) })
	must.Succeed(t, unix.Unmount(m.Target, 0))
	m.Claim = nil
	must.Succeed(t, m.Unmount(t.Context()))
}

// A filesystem failed that has the pool as a directory, or no part of it.
func TestSilentLoopDevicesBesidePoolDoNotCount(t *testing.T) {
	m, claim := newMounter(t)
	failed := testenv.LoopFS(t, "xfs", 300*mib)
	pool, beside := filepath.Join(failed, "pool"), filepath.Join(failed, "beside")
	must.Succeed(t, os.Mkdir(pool, 0o755), os.Mkdir(beside, 0o755))
	must.Succeed(t, unix.Mount(pool, claim, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(claim, unix.MNT_DETACH)) })
	must.Succeed(t, m.Mount(t.Context()))
	attachInContainer(t, beside)
	whole, volume := poolOn(t, "ext4")
	must.Succeed(t, os.WriteFile(filepath.Join(volume, "data"), nil, 0o600))
	testenv.ShutDown(t, failed)
	must.Succeed(t, m.Unmount(t.Context()), whole.Unmount(t.Context()))
}

// attachInContainer makes a file of a volume, and attaches it through a mount that belongs to no namespace any more.
func attachInContainer(t *testing.T, volume string) (detach func()) {
	t.Helper()
	must.Succeed(t, os.WriteFile(filepath.Join(volume, "disk.img"), nil, 0o600), os.Truncate(filepath.Join(volume, "disk.img"), mib/4))
	return attachThrough(t, filepath.Dir(volume), filepath.Base(volume)+"/disk.img")
}

func attachThrough(t *testing.T, pool, name string) (detach func()) {
	t.Helper()
	container := t.TempDir()
	must.Succeed(t, unix.Mount(pool, container, "", unix.MS_BIND, ""))
	dev, err := dir.Open("/dev")
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, dev.Close()) })
	in, err := dir.Open(filepath.Dir(filepath.Join(container, name)))
	must.Succeed(t, err)
	file, err := loop.Open(in, filepath.Base(name))
	must.Succeed(t, err)
	kernel := loop.NewKernel(dev)
	device, err := kernel.Attach(file, loop.Options{})
	must.Succeed(t, err, file.Close(), in.Close(), unix.Unmount(container, unix.MNT_DETACH))
	detach = func() { must.Succeed(t, kernel.Detach(t.Context(), device)) }
	t.Cleanup(func() {
		if now, err := kernel.Inspect(device.Name); err == nil {
			_ = kernel.Detach(context.WithoutCancel(t.Context()), now)
		}
	})
	return detach
}
