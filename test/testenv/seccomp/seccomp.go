// Package seccomp has the kernel act on system calls of this thread, and of all that it starts: a
// filter outlives execve(2), and new threads inherit it.
package seccomp

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Machines are how struct seccomp_data names the architecture of a call.
var Machines = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// Install adds a filter that takes an action (SECCOMP_RET_...) on each of these calls, and allows
// the others. Of clock_gettime(2) it is only taken on calls for CLOCK_REALTIME: others come many times a second. The flags are those of seccomp(2), and so is the result. Without no_new_privs, which
// would keep SELinux from its transitions, it needs CAP_SYS_ADMIN.
func Install(calls []int, action uint32, flags uintptr) (result int, err error) {
	const (
		load    = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal   = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		answer  = unix.BPF_RET | unix.BPF_K
		offNr   = 0 // of struct seccomp_data
		offArch = 4
		offArg  = 16 // the lower half of the first argument, on both machines
	)
	machine, known := Machines[runtime.GOARCH]
	if !known {
		return 0, fmt.Errorf("the numbers of system calls of %s are unknown", runtime.GOARCH)
	}
	program := []unix.SockFilter{
		{Code: load, K: offArch},
		{Code: equal, Jt: 1, K: machine},
		{Code: answer, K: unix.SECCOMP_RET_KILL_PROCESS}, // its numbers are others
		{Code: load, K: offNr},
	}
	for _, number := range calls {
		if number == unix.SYS_CLOCK_GETTIME {
			program = append(program,
				unix.SockFilter{Code: equal, Jf: 4, K: uint32(number)},
				unix.SockFilter{Code: load, K: offArg},
				unix.SockFilter{Code: equal, Jf: 1, K: unix.CLOCK_REALTIME},
				unix.SockFilter{Code: answer, K: action},
				unix.SockFilter{Code: answer, K: unix.SECCOMP_RET_ALLOW})
			continue
		}
		program = append(program, unix.SockFilter{Code: equal, Jf: 1, K: uint32(number)}, unix.SockFilter{Code: answer, K: action})
	}
	program = append(program, unix.SockFilter{Code: answer, K: unix.SECCOMP_RET_ALLOW})
	filter := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&filter)))
	if errno != 0 {
		return 0, fmt.Errorf("install a seccomp filter: %w", errno)
	}
	return int(fd), nil
}
