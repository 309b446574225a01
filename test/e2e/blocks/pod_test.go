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
func (b *bench) ask(device string, flags int, request func(fd int) error) {
	b.Helper()
	f, err := os.OpenFile(device, flags, 0)
	b.Must(err)
	defer f.Close()
	b.Must(request(int(f.Fd())))
}

func survivesAlteration(b *bench) {
	const size = 4 * mib
	b.create("disk", size)
	path := b.publish("disk", "pod")
	written := open(b, path, os.O_RDWR)
	written.write(0, size, 1)
	written.close()
	alter := func(change func(*unix.LoopInfo64)) {
		b.Helper()
		b.ask(path, os.O_RDWR, func(fd int) error {
			info, err := unix.IoctlLoopGetStatus64(fd)
			b.Must(err)
			change(info)
			return unix.IoctlLoopSetStatus64(fd, info)
		})
	}
	unmarked := func(info *unix.LoopInfo64) { info.File_name = [unix.LO_NAME_SIZE]uint8{} }
	alter(unmarked)
	b.publish("disk", "pod")
	alter(func(info *unix.LoopInfo64) { info.Offset = blockBytes })
	second := open(b, b.publish("disk", "second"), os.O_RDONLY)
	second.want(0, size, 1)
	second.close()
	b.unpublish("disk", "second")
	alter(unmarked)
	b.Crash()
	b.unpublish("disk", "pod")
	b.wantDevices(0)
}

// Kubelet has a loop device of its own on the one that is published, and takes it off before it unpublishes.
func keepsNumbersApart(b *bench) {
	const size = 4 * mib
	b.create("disk", size)
	b.create("other", size)
	path := b.publish("disk", "pod")
	kubelets, err := loopfs.Attach(path)
	b.Must(err)
	defer kubelets.Close() // ends it
	b.ask(path, os.O_RDWR, func(fd int) error { return unix.IoctlSetInt(fd, unix.LOOP_CLR_FD, 0) })
	b.wantDevices(1)
	b.Must(kubelets.Close())
	b.wantDevices(0)
	for range 2 {
		if was, is := number(b, path), number(b, b.publish("other", "another")); is == was {
			b.Fatalf("another volume got the device %d:%d, which is still published", unix.Major(was), unix.Minor(was))
		}
		b.unpublish("other", "another")
		b.Crash()
	}
	foreign := b.takeNumber(path)
	b.publish("other", "another")
	b.unpublish("disk", "pod")
	b.unpublish("other", "another")
	b.wantDevices(0)
	if foreign != "" {
		b.run("losetup", foreign)
	}
}

// takeNumber has a file of another driver of the node, whose devices have the same mark, get the number of a device that has ended. It is
// empty if another program was faster, which may detach its device at any time.
func (b *bench) takeNumber(path string) (device string) {
	b.Helper()
	device = fmt.Sprintf("/dev/loop%d", unix.Minor(number(b, path)))
	file := filepath.Join(b.TempDir(), "file")
	b.Must(os.WriteFile(file, make([]byte, 4*mib), 0o600))
	if err := exec.CommandContext(b.Context(), "losetup", device, file).Run(); err != nil {
		return ""
	}
	b.Cleanup(func() { must.Succeed(b, exec.Command("losetup", "--detach", device).Run()) })
	b.ask(device, os.O_RDWR, func(fd int) error {
		info, err := unix.IoctlLoopGetStatus64(fd)
		b.Must(err)
		info.File_name = [unix.LO_NAME_SIZE]uint8{}
		copy(info.File_name[:], "hostpath-provisioner.kubevirt.io")
		return unix.IoctlLoopSetStatus64(fd, info)
	})
	return device
}

func readersAreApart(b *bench) {
	const size = 4 * mib
	b.create("disk", size)
	written := open(b, b.publish("disk", "writer"), os.O_RDWR)
	written.write(0, size, 1)
	written.close()
	for range 2 { // kubelet asks again
		b.Must(b.tryPublishReadOnly("disk", "one"))
		b.Must(b.tryPublishReadOnly("disk", "other"))
		b.wantDevices(3)
	}
	pods := b.TempDir()
	forged, err := os.Create(filepath.Join(pods, "forged"))
	b.Must(err)
	defer forged.Close()
	b.Must(forged.Truncate(size))
	b.ask(b.Target("one"), os.O_RDONLY, func(fd int) error {
		return unix.IoctlSetInt(fd, changeFile, int(forged.Fd()))
	})
	reader := open(b, b.Target("other"), os.O_RDONLY)
	reader.want(0, size, 1)
	reader.close()
	b.unpublish("disk", "one")
	b.unpublish("disk", "other")
	b.unpublish("disk", "writer")
	if left, err := loopfs.Devices(pods); err != nil || len(left) > 0 {
		b.Errorf("the devices %v stay, %v", left, err)
	}
}
