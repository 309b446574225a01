package blocks

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// What a pod does to its own device. The kernel asks for no capability: only that the device is open, or open for
// writing (lo_ioctl() of drivers/block/loop.c).

// changeFile is LOOP_CHANGE_FD of linux/loop.h.
const changeFile = 0x4C06

// ask has a process that has the device open make a request of the loop driver.
func (h *harness) ask(device string, flags int, request func(fd int) error) {
	h.Helper()
	f := must.Value(os.OpenFile(device, flags, 0))(h)
	defer f.Close()
	h.Must(request(int(f.Fd())))
}

func survivesAlteration(h *harness) {
	const size = 4 * mib
	h.create("disk", size)
	path := h.publish("disk", "pod")
	written := open(h, path, os.O_RDWR)
	written.write(0, size, 1)
	written.close()
	alter := func(change func(*unix.LoopInfo64)) {
		h.Helper()
		h.ask(path, os.O_RDWR, func(fd int) error {
			info := must.Value(unix.IoctlLoopGetStatus64(fd))(h)
			change(info)
			return unix.IoctlLoopSetStatus64(fd, info)
		})
	}
	unmarked := func(info *unix.LoopInfo64) { info.File_name = [unix.LO_NAME_SIZE]uint8{} }
	alter(unmarked)
	h.publish("disk", "pod")
	alter(func(info *unix.LoopInfo64) { info.Offset = blockBytes })
	second := open(h, h.publish("disk", "second"), os.O_RDONLY)
	second.want(0, size, 1)
	second.close()
	h.MustUnpublish("disk", "second")
	alter(unmarked)
	h.Crash()
	h.MustUnpublish("disk", "pod")
	h.wantDevices(0)
}

// Kubelet has a loop device of its own on the one that is published, and takes it off before it unpublishes.
func keepsNumbersApart(h *harness) {
	const size = 4 * mib
	h.create("disk", size)
	h.create("other", size)
	path := h.publish("disk", "pod")
	kubelets := must.Value(loopfs.Attach(path))(h)
	defer kubelets.Close() // ends it
	h.ask(path, os.O_RDWR, func(fd int) error { return unix.IoctlSetInt(fd, unix.LOOP_CLR_FD, 0) })
	h.wantDevices(1)
	h.Must(kubelets.Close())
	h.wantDevices(0)
	for range 2 {
		if was, is := number(h, path), number(h, h.publish("other", "another")); is == was {
			h.Fatalf("another volume got the device %d:%d, which is still published", unix.Major(was), unix.Minor(was))
		}
		h.MustUnpublish("other", "another")
		h.Crash()
	}
	foreign := h.takeNumber(path)
	h.publish("other", "another")
	h.MustUnpublish("disk", "pod")
	h.MustUnpublish("other", "another")
	h.wantDevices(0)
	if foreign != "" {
		h.run("losetup", foreign)
	}
}

// takeNumber has a file of another driver of the node, whose devices have the same mark, get the number of a device that has ended. It is
// empty if another program was faster, which may detach its device at any time.
func (h *harness) takeNumber(path string) (device string) {
	h.Helper()
	device = fmt.Sprintf("/dev/loop%d", unix.Minor(number(h, path)))
	file := filepath.Join(h.TempDir(), "file")
	h.Must(os.WriteFile(file, make([]byte, 4*mib), 0o600))
	if err := exec.CommandContext(h.Context(), "losetup", device, file).Run(); err != nil {
		return ""
	}
	h.Cleanup(func() { must.Succeed(h, exec.Command("losetup", "--detach", device).Run()) })
	h.ask(device, os.O_RDWR, func(fd int) error {
		info := must.Value(unix.IoctlLoopGetStatus64(fd))(h)
		info.File_name = [unix.LO_NAME_SIZE]uint8{}
		copy(info.File_name[:], "hostpath-provisioner.kubevirt.io")
		return unix.IoctlLoopSetStatus64(fd, info)
	})
	return device
}

func readersAreApart(h *harness) {
	const size = 4 * mib
	h.create("disk", size)
	written := open(h, h.publish("disk", "writer"), os.O_RDWR)
	written.write(0, size, 1)
	written.close()
	for range 2 { // kubelet asks again
		h.Must(h.tryPublishReadOnly("disk", "one"))
		h.Must(h.tryPublishReadOnly("disk", "other"))
		h.wantDevices(3)
	}
	pods := h.TempDir()
	forged := must.Value(os.Create(filepath.Join(pods, "forged")))(h)
	defer forged.Close()
	h.Must(forged.Truncate(size))
	h.ask(h.Target("one"), os.O_RDONLY, func(fd int) error {
		return unix.IoctlSetInt(fd, changeFile, int(forged.Fd()))
	})
	reader := open(h, h.Target("other"), os.O_RDONLY)
	reader.want(0, size, 1)
	reader.close()
	h.MustUnpublish("disk", "one")
	h.MustUnpublish("disk", "other")
	h.MustUnpublish("disk", "writer")
	if left, err := loopfs.Devices(pods); err != nil || len(left) > 0 {
		h.Errorf("the devices %v stay, %v", left, err)
	}
}
