package devices_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func pointer(p *byte) unsafe.Pointer { return unsafe.Pointer(p) }

// addPartition has the kernel have a partition on a loop device, whether it knows any partition table or not (BLKPG).
func addPartition(t *testing.T, node string) string {
	t.Helper()
	device, err := os.OpenFile(node, os.O_RDWR, 0)
	must.Succeed(t, err)
	defer device.Close()
	// Without LO_FLAGS_PARTSCAN a loop device has no partitions.
	var info unix.LoopInfo64
	read, err := unix.IoctlLoopGetStatus64(int(device.Fd()))
	must.Succeed(t, err)
	info = *read
	info.Flags |= unix.LO_FLAGS_PARTSCAN
	must.Succeed(t, unix.IoctlLoopSetStatus64(int(device.Fd()), &info))
	part := unix.BlkpgPartition{Start: mib, Length: 8 * mib, Pno: 1}
	arg := unix.BlkpgIoctlArg{Op: unix.BLKPG_ADD_PARTITION, Datalen: int32(unsafe.Sizeof(part)), Data: (*byte)(unsafe.Pointer(&part))}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, device.Fd(), unix.BLKPG, uintptr(unsafe.Pointer(&arg))); errno != 0 {
		t.Fatalf("add a partition: %v", errno)
	}
	t.Cleanup(func() {
		device, err := os.OpenFile(node, os.O_RDWR, 0)
		must.Succeed(t, err)
		defer device.Close()
		arg.Op = unix.BLKPG_DEL_PARTITION
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, device.Fd(), unix.BLKPG, uintptr(unsafe.Pointer(&arg)))
		if errno != 0 && errno != unix.ENXIO {
			t.Errorf("remove the partition: %v", errno)
		}
	})
	return testNode(t, node+"p1")
}

// testNode is the node of a device, made where nothing made it.
func testNode(t *testing.T, node string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("/sys/class/block", filepath.Base(node), "dev"))
	if err != nil {
		testenv.Missing(t, "partitions of loop devices: "+err.Error())
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(string(content), "%d:%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	made := filepath.Join(t.TempDir(), filepath.Base(node))
	must.Succeed(t, unix.Mknod(made, unix.S_IFBLK|0o600, int(unix.Mkdev(major, minor))))
	return made
}

// deviceNode is the node of a device below /dev, where the kernel says that one is by its path.
func deviceNode(t *testing.T, node string) string {
	t.Helper()
	var st unix.Stat_t
	must.Succeed(t, unix.Stat(node, &st))
	made := filepath.Join("/dev", filepath.Base(node))
	err := unix.Mknod(made, unix.S_IFBLK|0o600, int(st.Rdev))
	if errors.Is(err, unix.EEXIST) {
		return made // devtmpfs
	}
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, os.Remove(made)) })
	return made
}
