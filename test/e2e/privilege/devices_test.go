package privilege

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A device is what a container may open and make nodes of. Minor -1 stands for all.
type device struct {
	block        bool
	major, minor int32
}

// What the driver needs, by the kernel's list of numbers (Documentation/admin-guide/devices.txt).
var (
	loopControl = device{false, 10, 237}
	loopDevices = device{true, 7, -1}
)

// deviceGroup makes a control group, which may use only these devices, until the test
// ends. It is one of version 2, which every kernel has.
func deviceGroup(t *testing.T, allowed ...device) string {
	t.Helper()
	return newGroup(t, filter(allowed))
}

// nodesGroup is one of what is not privileged: as container runtimes have it, it may make
// nodes of all devices, and open none of those that tests need.
func nodesGroup(t *testing.T) string {
	t.Helper()
	return newGroup(t, slices.Concat(nodes(), filter(nil)))
}

func newGroup(t *testing.T, code []instruction) string {
	t.Helper()
	top := t.TempDir()
	if err := unix.Mount("cgroup2", top, "cgroup2", 0, ""); err != nil {
		testenv.Missing(t, fmt.Sprintf("control groups of version 2 (%v)", err))
	}
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(top, 0)) })
	group, err := os.MkdirTemp(top, "hostpath-test-") //nolint:usetesting // a control group is no common directory
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, os.Remove(group)) })
	must.Succeed(t, attach(group, code))
	return filepath.Clean(group)
}

// An instruction is struct bpf_insn of linux/bpf.h.
type instruction struct {
	code      uint8
	registers uint8 // destination, and source in the upper half
	offset    int16
	value     int32
}

// nodes is the beginning of a filter, which lets through what only makes a node.
func nodes() []instruction {
	const makes = 1 // BPF_DEVCG_ACC_MKNOD, in the upper half of access_type
	return []instruction{
		{unix.BPF_LDX | unix.BPF_MEM | unix.BPF_W, 1<<4 | 2, 0, 0},
		{unix.BPF_ALU | unix.BPF_RSH | unix.BPF_K, 2, 0, 16},
		{unix.BPF_JMP | unix.BPF_JNE | unix.BPF_K, 2, 2, makes},
		{unix.BPF_ALU64 | unix.BPF_MOV | unix.BPF_K, 0, 0, 1},
		{unix.BPF_JMP | unix.BPF_EXIT, 0, 0, 0},
	}
}

// filter is a program of the kind BPF_PROG_TYPE_CGROUP_DEVICE: it gets struct
// bpf_cgroup_dev_ctx, and answers 1 for what is allowed.
func filter(allowed []device) []instruction {
	const (
		load    = unix.BPF_LDX | unix.BPF_MEM | unix.BPF_W
		and     = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
		differ  = unix.BPF_JMP | unix.BPF_JNE | unix.BPF_K
		move    = unix.BPF_ALU64 | unix.BPF_MOV | unix.BPF_K
		exit    = unix.BPF_JMP | unix.BPF_EXIT
		blocks  = 1 // BPF_DEVCG_DEV_BLOCK
		chars   = 2 // BPF_DEVCG_DEV_CHAR
		context = 1 << 4
	)
	code := []instruction{
		{load, context | 2, 0, 0}, // access_type: the kind is in the lower half
		{and, 2, 0, 0xffff},
		{load, context | 3, 4, 0}, // major
		{load, context | 4, 8, 0}, // minor
	}
	for _, d := range allowed {
		kind := int32(chars)
		if d.block {
			kind = blocks
		}
		// Each goes to the next device if it differs.
		tests := []instruction{{differ, 2, 0, kind}, {differ, 3, 0, d.major}}
		if d.minor >= 0 {
			tests = append(tests, instruction{differ, 4, 0, d.minor})
		}
		for i := range tests {
			tests[i].offset = int16(len(tests) - i + 1)
		}
		code = append(append(code, tests...), instruction{move, 0, 0, 1}, instruction{exit, 0, 0, 0})
	}
	return append(code, instruction{move, 0, 0, 0}, instruction{exit, 0, 0, 0})
}

// attach has a control group use only the devices that a filter lets through.
func attach(group string, code []instruction) error {
	program, err := loadFilter(code)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(program) }()
	directory, err := unix.Open(group, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("open", err)
	}
	defer func() { _ = unix.Close(directory) }()
	attributes := struct{ group, program, kind, flags uint32 }{uint32(directory), uint32(program), unix.BPF_CGROUP_DEVICE, unix.BPF_F_ALLOW_MULTI}
	if _, err := bpf(unix.BPF_PROG_ATTACH, unsafe.Pointer(&attributes), unsafe.Sizeof(attributes)); err != nil {
		return fmt.Errorf("attach a filter of devices: %w", err)
	}
	return nil
}

// loadFilter gives the kernel a program. The caller closes its descriptor.
func loadFilter(code []instruction) (int, error) {
	license := []byte("Apache-2.0\x00")
	load := struct {
		kind, count   uint32
		code, license unsafe.Pointer
		_             [6]uint64
	}{kind: unix.BPF_PROG_TYPE_CGROUP_DEVICE, count: uint32(len(code)), code: unsafe.Pointer(&code[0]), license: unsafe.Pointer(&license[0])}
	for tries := 0; ; tries++ {
		program, err := bpf(unix.BPF_PROG_LOAD, unsafe.Pointer(&load), unsafe.Sizeof(load))
		if errors.Is(err, unix.EAGAIN) && tries < 10_000 {
			continue // the verifier gives up when its thread has a signal to take (since Linux 5.0)
		}
		runtime.KeepAlive(code)
		runtime.KeepAlive(license)
		if err != nil {
			return 0, fmt.Errorf("load a filter of devices: %w", err)
		}
		return program, nil
	}
}

func bpf(command uintptr, attributes unsafe.Pointer, size uintptr) (int, error) {
	result, _, errno := unix.Syscall(unix.SYS_BPF, command, uintptr(attributes), size)
	if errno != 0 {
		return 0, os.NewSyscallError("bpf", errno)
	}
	return int(result), nil
}
