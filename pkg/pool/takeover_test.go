package pool_test

import (
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A pod can take the mark off its device and end while its pool does not answer: nothing can be compared or restored then.
func TestDeviceWithoutMarkIsTakenOver(t *testing.T) {
	for name, test := range map[string]func(t *testing.T, h *harness){
		"published": func(t *testing.T, h *harness) {
			must.Succeed(t, h.publishBlock("pvc-1", "b"))
			if d := h.attached(1)[0]; !d.Ours {
				t.Errorf("published is %+v, want a device of the driver", d)
			}
			must.Succeed(t, h.unpublish("pvc-1", "b"))
		},
		"deleted":                 func(*testing.T, *harness) {},
		"deleted after a restart": func(_ *testing.T, h *harness) { h.restart(mountedPool) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, mounts := newHanging(t)
				h.createBlock("pvc-1", mib)
				must.Succeed(t, h.publishBlock("pvc-1", "a"))
				must.Succeed(t, h.Loops.Alter(h.attached(1)[0].Name))
				release := mounts.hang()
				h.later(10 * time.Second)
				must.Succeed(t, h.Mounts.Unpublish(h.Target("a"), nil), h.unpublish("pvc-1", "a"))
				release()
				h.later(10 * time.Minute)
				held := must.Value(h.Loops.Hold(h.attached(1)[0].Name))(t)
				wantError(t, h.publishBlock("pvc-1", "b"), volume.ErrInUse)
				wantError(t, h.Delete(t.Context(), id(t, "pvc-1")), volume.ErrInUse)
				held()
				test(t, h)
				h.delete("pvc-1")
				h.attached(0)
			})
		})
	}
}

// In a shared pool the mark of what was published stays for as long as its device does.
func TestMarkOfVolumeWhoseDeviceHasNoneIsRemoved(t *testing.T) {
	inShared(t, func(t *testing.T, one, two *harness) {
		one.createBlock("pvc-1", mib)
		must.Succeed(t, one.publishBlock("pvc-1", "a"))
		must.Succeed(t, one.Loops.Alter(one.attached(1)[0].Name))
		must.Succeed(t, one.Mounts.Unpublish(one.Target("a"), nil))
		one.later(2 * time.Minute)
		must.Succeed(t, two.publishBlock("pvc-1", "b"))
	})
}

// The same with devices and mounts of the kernel, and a pool whose directory is away.
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
	attached := func() bool {
		return slices.ContainsFunc(must.Value(h.devices.Attached("disk.img"))(t), func(d loop.Device) bool { return d.Backing == file })
	}
	t.Cleanup(func() { // if it was not detached
		for _, d := range must.Value(h.devices.Attached("disk.img"))(t) {
			if d.Backing == file {
				must.Succeed(t, h.devices.Reclaim(d))
			}
		}
	})
	device := must.Value(unix.Open(h.Path("pods", "a"), unix.O_RDWR|unix.O_CLOEXEC, 0))(t)
	info := must.Value(unix.IoctlLoopGetStatus64(device))(t)
	info.File_name = [unix.LO_NAME_SIZE]uint8{'x'}
	must.Succeed(t, unix.IoctlLoopSetStatus64(device, info), unix.Close(device))
	must.Succeed(t, os.Rename(h.Path("pool"), h.Path("away")))
	must.Succeed(t, h.unpublish("pvc-1", "a"))
	if attached() {
		t.Error("the device stays attached")
	}
	must.Succeed(t, os.Rename(h.Path("away"), h.Path("pool")))
	must.Succeed(t, h.publishBlock("pvc-1", "b"), h.unpublish("pvc-1", "b"))
	h.delete("pvc-1")
}
