package blockdev_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// The agent of a container that has process ids of its own sees no user, and must not take that for none.
func TestUsersThatMayNotBeLookedAt(t *testing.T) {
	testenv.NeedRoot(t)
	const inside = "BLOCKDEV_TEST_INSIDE"
	if os.Getenv(inside) != "" {
		if _, err := (blockdev.View{}).FindUsers(nil); !errors.Is(err, blockdev.ErrHidden) {
			t.Errorf("FindUsers = %v, want %v", err, blockdev.ErrHidden)
		}
		return
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, output)
	}
}

// Threads may have descriptors of their own, and go on after the first one, which the process has its number of, has ended.
func TestThreadThatHasDeviceOpenIsUser(t *testing.T) {
	for _, how := range []string{"on its own", "after the first one has ended"} {
		t.Run(how, func(t *testing.T) {
			path, device := attach(t, 1*mib, 0)
			facts, err := blockdev.Inspect(device.Number())
			must.Succeed(t, err)
			cmd := exec.CommandContext(t.Context(), otherProgram(t))
			cmd.Env = append(os.Environ(), threadVariable+"="+path, howVariable+"="+how)
			input, err := cmd.StdinPipe()
			must.Succeed(t, err)
			output, err := cmd.StdoutPipe()
			must.Succeed(t, err)
			must.Succeed(t, cmd.Start())
			line := make([]byte, len("open\n"))
			if _, err := output.Read(line); err != nil || string(line) != "open\n" {
				t.Fatalf("opening it: %q, %v", line, err)
			}
			users, err := only(cmd.Process.Pid).FindUsers([]blockdev.Facts{facts})
			must.Succeed(t, errors.Join(err, input.Close()))
			_ = cmd.Wait() // it has been told to end
			if len(users.Processes) != 1 {
				t.Errorf("its users are %+v, want the process", users)
			}
		})
	}
}

// otherProgram is this one by another name: what this program has forked is no user.
func otherProgram(t *testing.T) string {
	t.Helper()
	other := filepath.Join(t.TempDir(), "other")
	program, err := os.ReadFile("/proc/self/exe")
	must.Succeed(t, err)
	must.Succeed(t, os.WriteFile(other, program, 0o700))
	return other
}

const threadVariable, howVariable = "BLOCKDEV_TEST_THREAD", "BLOCKDEV_TEST_HOW"

func init() {
	if os.Getenv(threadVariable) != "" {
		runtime.LockOSThread() // main is to have the first thread
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// inThread opens a device for writing in a thread that is not the first one, until it is told to end.
func inThread(path string, alone bool) {
	opened := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		if !alone {
			check(unix.Unshare(unix.CLONE_FILES))
		}
		_, err := unix.Open(path, unix.O_RDWR, 0)
		check(err)
		close(opened)
		for first := []byte(nil); alone && !bytes.Contains(first, []byte(") Z ")); {
			first, err = os.ReadFile(fmt.Sprintf("/proc/self/task/%d/stat", os.Getpid()))
			check(err)
		}
		fmt.Println("open")
		_, _ = os.Stdin.Read(make([]byte, 1)) // until the test has looked
		os.Exit(0)
	}()
	if <-opened; alone {
		_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
	}
	select {}
}

// What was mapped is used, although its descriptor is closed, and although it cannot be written before mprotect(2) has said so. A
// mapping of what was opened for reading never can.
func TestMemoryOfDeviceIsUse(t *testing.T) {
	if os.Getenv(mappedVariable) != "" {
		holdMapped(t)
		return
	}
	for name, c := range map[string]struct {
		flags, protection, users int
	}{
		"for writing":        {os.O_RDWR, unix.PROT_READ | unix.PROT_WRITE, 1},
		"for reading as yet": {os.O_RDWR, unix.PROT_READ, 1},
		"for reading":        {os.O_RDONLY, unix.PROT_READ, 0},
	} {
		t.Run(name, func(t *testing.T) {
			path, device := attach(t, 1*mib, 0)
			facts, err := blockdev.Inspect(device.Number())
			must.Succeed(t, err)
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestMemoryOfDeviceIsUse$")
			cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %d", mappedVariable, path, c.flags, c.protection))
			input, err := cmd.StdinPipe()
			must.Succeed(t, err)
			output, err := cmd.StdoutPipe()
			must.Succeed(t, err)
			must.Succeed(t, cmd.Start())
			line := make([]byte, len("mapped\n"))
			if _, err := output.Read(line); err != nil || string(line) != "mapped\n" {
				t.Fatalf("mapping it: %q, %v", line, err)
			}
			users, err := only(cmd.Process.Pid).FindUsers([]blockdev.Facts{facts})
			mapped, mappedErr := blockdev.FileMappings(cmd.Process.Pid)
			must.Succeed(t, errors.Join(err, mappedErr, input.Close()))
			_ = cmd.Wait() // it has been told to end
			if len(users.Processes) != c.users || mapped != c.users {
				t.Errorf("its users are %+v, and %d mappings are found on an older kernel, want %d", users, mapped, c.users)
			}
		})
	}
}

// A program may close the descriptor of a device that it has registered with io_uring, and still write to it.
func TestDeviceInRingIsUse(t *testing.T) {
	if path := os.Getenv(ringVariable); path != "" {
		holdRegistered(t, path)
		return
	}
	path, device := attach(t, 1*mib, 0)
	facts, err := blockdev.Inspect(device.Number())
	must.Succeed(t, err)
	elsewhere := filepath.Join(t.TempDir(), "of another name")
	must.Succeed(t, unix.Mknod(elsewhere, unix.S_IFBLK|0o600, int(device.Number().Dev())))
	for name, c := range map[string]struct {
		path  string
		users int
	}{"by its name": {path, 1}, "by another": {elsewhere, 1}, "another file": {filepath.Join(t.TempDir(), "file"), 0}} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), otherProgram(t), "-test.run=^TestDeviceInRingIsUse$")
			cmd.Env = append(os.Environ(), ringVariable+"="+c.path)
			input, err := cmd.StdinPipe()
			must.Succeed(t, err)
			output, err := cmd.StdoutPipe()
			must.Succeed(t, err)
			must.Succeed(t, cmd.Start())
			line := make([]byte, len("ring\n"))
			_, err = output.Read(line)
			must.Succeed(t, err)
			users, err := only(cmd.Process.Pid).FindUsers([]blockdev.Facts{facts})
			must.Succeed(t, errors.Join(err, input.Close()))
			_ = cmd.Wait() // it has been told to end
			if string(line) == "none\n" {
				return // no process of this machine can have a ring
			}
			if len(users.Processes) != c.users {
				t.Errorf("its users are %+v, want %d", users, c.users)
			}
		})
	}
}

const ringVariable = "BLOCKDEV_TEST_RING"

// holdRegistered has a file open nowhere but in a ring, until it is told to end.
func holdRegistered(t *testing.T, path string) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT, 0o600)
	must.Succeed(t, err)
	var params [120]byte // struct io_uring_params of linux/io_uring.h
	ring, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if errno == unix.ENOSYS || errno == unix.EPERM {
		fmt.Println("none")
	} else {
		const files = 2 // IORING_REGISTER_FILES
		all := [1]int32{int32(fd)}
		_, _, registered := unix.Syscall6(unix.SYS_IO_URING_REGISTER, ring, files, uintptr(unsafe.Pointer(&all)), 1, 0, 0)
		if errno != 0 || registered != 0 {
			t.Fatal(errno, registered)
		}
		must.Succeed(t, unix.Close(fd))
		fmt.Println("ring")
	}
	_, _ = os.Stdin.Read(make([]byte, 1))
}

const mappedVariable = "BLOCKDEV_TEST_MAPPED"

func holdMapped(t *testing.T) {
	t.Helper()
	var path string
	var flags, protection int
	_, err := fmt.Sscan(os.Getenv(mappedVariable), &path, &flags, &protection)
	must.Succeed(t, err)
	file, err := os.OpenFile(path, flags, 0)
	must.Succeed(t, err)
	_, err = unix.Mmap(int(file.Fd()), 0, 4096, protection, unix.MAP_SHARED)
	must.Succeed(t, errors.Join(err, file.Close()))
	fmt.Println("mapped")
	_, _ = os.Stdin.Read(make([]byte, 1)) // until the other test ends
}

// only looks at one process, and at the loop devices of these tests: those of other packages are not what is tested.
func only(process int) blockdev.View {
	return blockdev.View{Unseen: func(pid int) bool { return pid != process }, UnseenLoop: testenv.IsLoopOfOthers}
}
