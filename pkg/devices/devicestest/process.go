package devicestest

import (
	"context"
	"os/exec"
	"sync"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// With runs a shell script in a mount namespace of its own, up to where it says that it is ready, until the test ends.
func With(t testing.TB, script string, args ...string) (end func()) {
	t.Helper()
	// Not by the test's context, which ends before the cleanups: unmounting writes to the journal, and the disk is compared first.
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "sh", append([]string{"-c", script + ` && echo ready && read line`, "sh"}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	input, err := cmd.StdinPipe()
	must.Succeed(t, err)
	output, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, cmd.Start())
	end = sync.OnceFunc(func() {
		must.Succeed(t, input.Close())
		_ = cmd.Wait() // read has found the end
	})
	t.Cleanup(end)
	line := make([]byte, len("ready\n"))
	if _, err := output.Read(line); err != nil || string(line) != "ready\n" {
		t.Fatalf("%s: %q, %v", script, line, err)
	}
	return end
}
