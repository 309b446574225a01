package devices_test

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// opensForWriting has the kernel say whether the node of a disk was closed by a program that had it open for writing.
func opensForWriting(d *devicestest.Disk) func() bool {
	d.Helper()
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	must.Succeed(d, err)
	d.Cleanup(func() { must.Succeed(d, unix.Close(fd)) })
	_, err = unix.InotifyAddWatch(fd, d.Node, unix.IN_CLOSE_WRITE)
	must.Succeed(d, err)
	return func() bool {
		n, err := unix.Read(fd, make([]byte, 4096))
		if !errors.Is(err, unix.EAGAIN) {
			must.Succeed(d, err)
		}
		return n > 0
	}
}

// Opening a device for writing may be an act of its own, as where it makes a node the primary one of a replicated disk. So nothing is opened so
// before all is known that has to be.
func TestOnlyDeviceOfReleasedVolumeIsOpenedForWriting(t *testing.T) {
	for name, c := range map[string]struct {
		before func(h *devicestest.Harness, d *devicestest.Disk, v *devices.Volume)
		want   devices.Reason
	}{
		"it is cleaned":  {func(*devicestest.Harness, *devicestest.Disk, *devices.Volume) {}, ""},
		"without volume": {func(h *devicestest.Harness, _ *devicestest.Disk, _ *devices.Volume) { h.PVs = nil }, devices.WasBound},
		"another disk":   {func(_ *devicestest.Harness, _ *devicestest.Disk, v *devices.Volume) { v.Identity = "serial=another" }, devices.OtherDevice},
		"another volume": {func(_ *devicestest.Harness, _ *devicestest.Disk, v *devices.Volume) { v.UID = "uid of an earlier one" }, devices.Contradiction},
		"no record": {func(h *devicestest.Harness, _ *devicestest.Disk, _ *devices.Volume) {
			h.Open(h.TempDir())
			h.Restart()
		}, devices.NotIdentified},
		"no answer": {func(h *devicestest.Harness, _ *devicestest.Disk, _ *devices.Volume) {
			h.API = func() ([]devices.Volume, error) { return nil, errors.New("no answer") }
		}, devices.NotConfirmed},
	} {
		t.Run(name, func(t *testing.T) {
			h := devicestest.New(t)
			d := h.Disk("disk", 8*mib)
			h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
			v := &h.PVs[0]
			c.before(h, d, v)
			opened := opensForWriting(d)
			if c.want != "" {
				h.Refused(c.want)
			} else if r := h.Pass(); len(r.Cleaned) != 1 {
				t.Fatalf("found %+v, want it cleaned", r)
			}
			if is := opened(); is != (c.want == "") {
				t.Errorf("it was opened for writing: %t", is)
			}
		})
	}
}
