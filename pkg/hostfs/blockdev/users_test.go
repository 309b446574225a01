package blockdev_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

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

// What was mapped is used, although its descriptor is closed.
func TestMemoryOfDeviceIsUse(t *testing.T) {
	path, device := attach(t, 1*mib, 0)
	facts, err := blockdev.Inspect(device.Number())
	must.Succeed(t, err)
	const mapped = "BLOCKDEV_TEST_MAPPED"
	if os.Getenv(mapped) != "" {
		file, err := os.OpenFile(os.Getenv(mapped), os.O_RDWR, 0)
		must.Succeed(t, err)
		_, err = unix.Mmap(int(file.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		must.Succeed(t, errors.Join(err, file.Close()))
		fmt.Println("mapped")
		_, _ = os.Stdin.Read(make([]byte, 1)) // until the other test ends
		return
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), mapped+"="+path)
	input, err := cmd.StdinPipe()
	must.Succeed(t, err)
	output, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, cmd.Start())
	line := make([]byte, len("mapped\n"))
	if _, err := output.Read(line); err != nil || string(line) != "mapped\n" {
		t.Fatalf("mapping it: %q, %v", line, err)
	}
	users, err := blockdev.View{Unseen: func(pid int) bool { return pid != cmd.Process.Pid }}.FindUsers([]blockdev.Facts{facts})
	must.Succeed(t, errors.Join(err, input.Close()))
	_ = cmd.Wait() // it has been told to end
	if len(users.Processes) != 1 {
		t.Errorf("its users are %+v, want the process", users)
	}
}
