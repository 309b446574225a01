package mounter_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/mounter"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
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

// attachInContainer attaches a file of a volume to a loop device through a mount that belongs to no namespace any more.
func attachInContainer(t *testing.T, volume string) (detach func()) {
	t.Helper()
	container := t.TempDir()
	must.Succeed(t, unix.Mount(filepath.Dir(volume), container, "", unix.MS_BIND, ""))
	must.Succeed(t, os.WriteFile(filepath.Join(volume, "disk.img"), nil, 0o600), os.Truncate(filepath.Join(volume, "disk.img"), mib/4))
	dev, err := dir.Open("/dev")
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, dev.Close()) })
	in, err := dir.Open(filepath.Join(container, filepath.Base(volume)))
	must.Succeed(t, err)
	file, err := loop.Open(in, "disk.img")
	must.Succeed(t, err)
	kernel := loop.NewKernel(dev)
	device, err := kernel.Attach(file, loop.Options{})
	must.Succeed(t, err, file.Close(), in.Close(), unix.Unmount(container, unix.MNT_DETACH))
	detach = func() { must.Succeed(t, kernel.Detach(t.Context(), device)) }
	t.Cleanup(func() { _ = kernel.Detach(t.Context(), device) })
	return detach
}
