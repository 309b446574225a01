package devices_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/seccomp"
)

func pointer(p *byte) unsafe.Pointer { return unsafe.Pointer(p) }

// addPartition has the kernel have a partition on a loop device, whether it knows any partition table or not (BLKPG).
func addPartition(t *testing.T, node string) string {
	t.Helper()
	return testNode(t, addPartitionAt(t, node, 1, mib))
}

// addPartitionAt does so for any number and start, in bytes, and answers the kernel's name of the node.
func addPartitionAt(t *testing.T, node string, number int, start int64) string {
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
	part := unix.BlkpgPartition{Start: start, Length: 8 * mib, Pno: int32(number)}
	arg := unix.BlkpgIoctlArg{Op: unix.BLKPG_ADD_PARTITION, Datalen: int32(unsafe.Sizeof(part)), Data: (*byte)(unsafe.Pointer(&part))}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, device.Fd(), unix.BLKPG, uintptr(unsafe.Pointer(&arg))); errno != 0 {
		t.Fatalf("add a partition: %v", errno)
	}
	t.Cleanup(func() {
		if errno := removePartition(t, node, number); errno != 0 && errno != unix.ENXIO {
			t.Errorf("remove the partition: %v", errno)
		}
	})
	return fmt.Sprintf("%sp%d", node, number)
}

// removePartition has the kernel forget a partition.
func removePartition(t *testing.T, node string, number int) unix.Errno {
	t.Helper()
	device, err := os.OpenFile(node, os.O_RDWR, 0)
	must.Succeed(t, err)
	defer device.Close()
	part := unix.BlkpgPartition{Pno: int32(number)}
	arg := unix.BlkpgIoctlArg{Op: unix.BLKPG_DEL_PARTITION, Datalen: int32(unsafe.Sizeof(part)), Data: (*byte)(unsafe.Pointer(&part))}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, device.Fd(), unix.BLKPG, uintptr(unsafe.Pointer(&arg)))
	return errno
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
	if _, err := os.Stat(node); err != nil {
		node = testNode(t, node)
	}
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

// beforeHolding calls a function, and has something be done when it is about to open a file exclusively: before the call
// that does so is made (seccomp(2), SECCOMP_RET_USER_NOTIF).
func beforeHolding(t *testing.T, do, call func() error) error {
	t.Helper()
	listener, called := make(chan int, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // which ends with its filter
		fd, err := seccomp.Install([]int{unix.SYS_OPENAT}, unix.SECCOMP_RET_USER_NOTIF, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER)
		listener <- fd
		if err == nil {
			err = call()
		}
		called <- err
	}()
	fd := <-listener
	for {
		waiting := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(waiting, 50); err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatal(err)
		}
		if waiting[0].Revents&unix.POLLIN == 0 {
			select {
			case err := <-called:
				return errors.Join(err, unix.Close(fd))
			default:
				continue
			}
		}
		do = letOpen(t, fd, do)
	}
}

// letOpen lets one file be opened, and does what is to be done if that is exclusive. It returns what is still to be done.
func letOpen(t *testing.T, listener int, do func() error) func() error {
	t.Helper()
	var asked struct { // seccomp_notif
		id         uint64
		pid, flags uint32
		nr         int32
		arch       uint32
		ip         uint64
		args       [6]uint64
	}
	var answer struct { // seccomp_notif_resp
		id    uint64
		value int64
		errno int32
		flags uint32
	}
	control := func(request uint, arg unsafe.Pointer) {
		t.Helper()
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), uintptr(request), uintptr(arg))
		if errno != 0 && errno != unix.ENOENT { // a signal has come first, and it asks again
			t.Fatal(errno)
		}
	}
	control(unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&asked))
	if asked.args[2]&unix.O_EXCL != 0 && do != nil {
		must.Succeed(t, do())
		do = nil
	}
	answer.id, answer.flags = asked.id, unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE
	control(unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&answer))
	return do
}
