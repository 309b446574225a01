package inspect

import (
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/testenv/seccomp"
)

// programVariable makes this program the launcher of the one that it names.
const programVariable = "INSPECT_TEST_PROGRAM"

// syncing are the calls that have a disk write, and may wait for others who do.
var syncing = []int{unix.SYS_SYNC, unix.SYS_SYNCFS, unix.SYS_FSYNC, unix.SYS_FDATASYNC, unix.SYS_MSYNC, unix.SYS_SYNC_FILE_RANGE}

// launch becomes the program, which the kernel kills if it syncs: the filter outlives
// execve(2), and new threads inherit it.
func launch(program string) error {
	// A filter is the thread's own, and that thread is the one that becomes the program.
	runtime.LockOSThread()
	if _, err := seccomp.Install(syncing, unix.SECCOMP_RET_KILL_PROCESS, 0); err != nil {
		return err
	}
	return syscall.Exec(program, append([]string{program}, os.Args[1:]...), os.Environ())
}
