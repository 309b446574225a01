package pool_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A pod can take the mark off its device and end while its pool is away: nothing can be compared then.
func TestDeviceWithoutMarkIsDetachedWithoutPool(t *testing.T) {
	testenv.NeedRoot(t)
	h := newHarness(t, t.TempDir())
	h.Dev = must.Value(dir.Open("/dev"))(t)
	h.table, h.devices = must.Value(bind.NewKernel())(t), loop.NewKernel(h.Dev)
	h.Set = h.Start(h.Configs(local), h.options("node-1"))
	must.Succeed(t, h.Wait(t.Context()))
	h.createBlock("pvc-1", mib)
	must.Succeed(t, h.publishBlock("pvc-1", "a"))
	file := h.disk("pvc-1").ID()
	device := must.Value(unix.Open(h.Path("pods", "a"), unix.O_RDWR|unix.O_CLOEXEC, 0))(t)
	info := must.Value(unix.IoctlLoopGetStatus64(device))(t)
	info.File_name = [unix.LO_NAME_SIZE]uint8{'x'}
	must.Succeed(t, unix.IoctlLoopSetStatus64(device, info), unix.Close(device))
	must.Succeed(t, os.Rename(h.Path("pool"), h.Path("away")))
	must.Succeed(t, h.unpublish("pvc-1", "a"))
	for _, d := range must.Value(h.devices.Attached("disk.img"))(t) {
		if d.Backing == file {
			t.Errorf("%s stays attached", d.Name)
			device := must.Value(unix.Open("/dev/"+d.Name, unix.O_RDWR|unix.O_CLOEXEC, 0))(t)
			must.Succeed(t, unix.IoctlSetInt(device, unix.LOOP_CLR_FD, 0), unix.Close(device))
		}
	}
	must.Succeed(t, os.Rename(h.Path("away"), h.Path("pool")))
	must.Succeed(t, h.publishBlock("pvc-1", "b"), h.unpublish("pvc-1", "b"))
	h.delete("pvc-1")
}

// A pod can have a file without a key where that of a block volume would be, in a volume without a record.
func TestFileThatCannotBeOpenedKeepsNoVolume(t *testing.T) {
	testenv.NeedRoot(t)
	for name, pools := range map[string]string{"local": local, "shared": sharedPool} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, testenv.MadeFS(t, "ext4", 64<<20, "-O", "encrypt"))
			h.table = must.Value(bind.NewKernel())(t)
			must.Succeed(t, os.MkdirAll(h.Path("pool", "pvc-1"), 0o777))
			h.Set = h.Start(h.Configs(pools), h.options("node-1"))
			must.Succeed(t, h.Wait(t.Context()), h.publish("pvc-1", "a"))
			encrypted := h.Path("pods", "a", "encrypted")
			must.Succeed(t, os.Mkdir(encrypted, 0o777))
			takeKey := testenv.Encrypt(t, encrypted)
			must.Succeed(t, os.WriteFile(filepath.Join(encrypted, "disk.img"), make([]byte, 4096), 0o600))
			must.Succeed(t, os.Rename(filepath.Join(encrypted, "disk.img"), h.Path("pods", "a", "disk.img")))
			takeKey()
			_, err := os.Open(h.Path("pool", "pvc-1", "disk.img"))
			must.ErrorIs(t, err, unix.ENOKEY)
			wantError(t, h.Delete(t.Context(), id(t, "pvc-1")), volume.ErrInUse)
			must.Succeed(t, h.unpublish("pvc-1", "a"))
			h.delete("pvc-1")
		})
	}
}
