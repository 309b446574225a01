package inspect

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// programVariable makes this program the launcher of the one that it names.
const programVariable = "INSPECT_TEST_PROGRAM"

// syncing are the calls that have a disk write, and may wait for others who do.
var syncing = []uintptr{unix.SYS_SYNC, unix.SYS_SYNCFS, unix.SYS_FSYNC, unix.SYS_FDATASYNC, unix.SYS_MSYNC, unix.SYS_SYNC_FILE_RANGE}

// machines are how seccomp_data names the architecture of a call.
var machines = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// launch becomes the program, which the kernel kills if it syncs: the filter outlives
// execve(2), and new threads inherit it.
func launch(program string) error {
	// A filter is the thread's own, and that thread is the one that becomes the program.
	runtime.LockOSThread()
	if err := forbid(syncing); err != nil {
		return err
	}
	return syscall.Exec(program, append([]string{program}, os.Args[1:]...), os.Environ())
}

// forbid has the kernel kill this thread's program when it makes one of the calls. Without
// no_new_privs that needs CAP_SYS_ADMIN.
func forbid(calls []uintptr) error {
	const (
		load    = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal   = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		answer  = unix.BPF_RET | unix.BPF_K
		offNr   = 0 // of struct seccomp_data
		offArch = 4
	)
	machine, known := machines[runtime.GOARCH]
	if !known {
		return errors.New("system calls of " + runtime.GOARCH + " cannot be known")
	}
	program := []unix.SockFilter{
		{Code: load, K: offArch},
		{Code: equal, Jt: 1, K: machine},
		{Code: answer, K: unix.SECCOMP_RET_KILL_PROCESS}, // it would get by unseen
		{Code: load, K: offNr},
	}
	for _, number := range calls {
		program = append(program,
			unix.SockFilter{Code: equal, Jf: 1, K: uint32(number)},
			unix.SockFilter{Code: answer, K: unix.SECCOMP_RET_KILL_PROCESS})
	}
	program = append(program, unix.SockFilter{Code: answer, K: unix.SECCOMP_RET_ALLOW})
	filter := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&filter))); errno != 0 {
		return fmt.Errorf("install a seccomp filter: %w", errno)
	}
	return nil
}
