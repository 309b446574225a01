package drivertest

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// isParent makes this test binary one that has a child.
const isParent = "DRIVERTEST_PARENT"

func TestMain(m *testing.M) {
	if os.Getenv(isParent) != "" {
		os.Exit(haveChild())
	}
	testenv.Main(m)
}

// haveChild starts a child that shares the standard output and waits for it.
func haveChild() int {
	cmd := exec.Command("sleep", "3600")
	cmd.Stdout = os.Stdout
	child, err := startChild(cmd)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("child", child.Pid)
	<-child.exited
	return 0
}

// No driver outlives a test that is killed.
func TestChildDiesWithParent(t *testing.T) {
	self, err := os.Executable()
	must.Succeed(t, err)
	parent := exec.CommandContext(t.Context(), self)
	parent.Env = append(os.Environ(), isParent+"=1")
	output, err := parent.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, parent.Start())
	_, err = output.Read(make([]byte, 64))
	must.Succeed(t, err)
	must.Succeed(t, parent.Process.Kill())
	// The pipe ends when neither of them holds it any more; a child that lives on
	// is found by the test's timeout.
	if rest, err := io.ReadAll(output); err != nil || len(rest) > 0 {
		t.Errorf("after the parent's death: %q, %v", rest, err)
	}
	_ = parent.Wait()
}
