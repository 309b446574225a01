package mountns_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// program makes this test binary one that mounts and waits.
const program = "MOUNTNS_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(program) != "" {
		os.Exit(rerun())
	}
	testenv.Main(m)
}

func rerun() int {
	if !mountns.Inside() {
		status, err := mountns.Rerun(syscall.SIGTERM)
		if err != nil {
			fmt.Println(err)
		}
		return status
	}
	return mountAndWait()
}

// mountAndWait shows where it has mounted something, waits for SIGTERM and says
// that it came.
func mountAndWait() int {
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGTERM)
	if err := syscall.Mount("tmpfs", os.TempDir(), "tmpfs", 0, ""); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(os.TempDir())
	<-asked
	fmt.Println("asked to end")
	return 3
}

// outerRun is this test binary as a program that has not yet been rerun.
func outerRun(t *testing.T) *exec.Cmd {
	t.Helper()
	testenv.NeedRoot(t)
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), program+"=1", "HOSTPATH_OUTER_MOUNTS=", "TMPDIR="+t.TempDir())
	cmd.Stderr = os.Stderr
	return cmd
}

// startWaiting starts a run that has something mounted and returns where, and
// what it will still write.
func startWaiting(t *testing.T) (cmd *exec.Cmd, tmp string, output *bufio.Reader) {
	t.Helper()
	cmd = outerRun(t)
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	output = bufio.NewReader(pipe)
	line, err := output.ReadString('\n')
	if tmp = strings.TrimSpace(line); err != nil || !filepath.IsAbs(tmp) {
		t.Fatalf("the inner run said %q (%v), want its TMPDIR", line, err)
	}
	return cmd, tmp, output
}

func TestRerunIsolation(t *testing.T) {
	cmd, tmp, output := startWaiting(t)
	if seen, err := mountns.Below(tmp); err != nil || len(seen) > 0 {
		t.Errorf("mounts of the inner run are seen outside: %q, %v", seen, err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(output); err != nil || string(rest) != "asked to end\n" {
		t.Errorf("after SIGTERM the inner run said %q, %v", rest, err)
	}
	_ = cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != 3 {
		t.Errorf("exit status %d, want 3", got)
	}
	if _, err := os.Stat(tmp); !os.IsNotExist(err) {
		t.Errorf("%s was left behind (%v)", tmp, err)
	}
}

func TestRerunChildEndsWithParent(t *testing.T) {
	cmd, _, output := startWaiting(t)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(output); err != nil || string(rest) != "asked to end\n" {
		t.Errorf("after its parent's death the inner run said %q, %v", rest, err)
	}
	_ = cmd.Wait()
}
