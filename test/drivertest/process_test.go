package drivertest

import (
	"context"
	"debug/buildinfo"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// standInConfig makes this test binary the driver.
func standInConfig(t *testing.T, name string) Config {
	t.Helper()
	t.Setenv(behaviour, name)
	t.Setenv("TMPDIR", t.TempDir())
	// The race detector has a program linger for a second when it ends.
	t.Setenv("GORACE", "atexit_sleep_ms=0")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return Config{
		Binary:  self,
		Name:    "node-a",
		Version: "1",
		Pools:   []PoolConfig{{Name: "local", Path: "/pool"}, {Name: "thin", Path: "/other", Allocation: "thin"}},
		Flags:   []string{"--v=5"},
	}
}

func startStandIn(t *testing.T, name string) *Process {
	t.Helper()
	n, err := StartProcess(t.Context(), standInConfig(t, name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		wantEmpty(t, os.TempDir())
	})
	return n
}

func TestStartPassesFlagsAndWaitsUntilReady(t *testing.T) {
	n := startStandIn(t, "ready later")
	info, err := csi.NewIdentityClient(n.Conn()).GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() != "after 4 probes" {
		t.Errorf("the driver answered %v, %v; want it to be ready after 4 probes", info, err)
	}
	want := "--endpoint=" + n.Endpoint() + ` --nodeid=node-a --version=1 --datadir=[{"name":"local","path":"/pool"},{"name":"thin","path":"/other","allocation":"thin"}] --metrics-address= --v=5`
	if !strings.Contains(n.Log(), want) {
		t.Errorf("the driver was started with %q, want %q", n.Log(), want)
	}
}

func TestRestart(t *testing.T) {
	for name, end := range map[string]func(*Process) error{"stopped": (*Process).Stop, "killed": (*Process).Kill} {
		t.Run(name, func(t *testing.T) {
			n := startStandIn(t, "ready")
			if err := n.Restart(t.Context()); err == nil {
				t.Error("a running driver was started a second time")
			}
			if err := end(n); err != nil {
				t.Fatal(err)
			}
			if n.Running() {
				t.Error("still running")
			}
			if err := end(n); err == nil {
				t.Error("a driver that does not run was ended")
			}
			if err := n.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			if !n.Running() || strings.Count(n.Log(), "--nodeid=node-a") != 2 {
				t.Errorf("running: %v, log: %s", n.Running(), n.Log())
			}
		})
	}
}

func TestStartReportsExitStatusAndLog(t *testing.T) {
	_, err := StartProcess(t.Context(), standInConfig(t, "dies at start"))
	if err == nil || !strings.Contains(err.Error(), "exit status 5") || !strings.Contains(err.Error(), "cannot start") {
		t.Errorf("Start = %v, want the exit status and the last line of the log", err)
	}
	wantEmpty(t, os.TempDir())
}

func TestStartWithoutBinary(t *testing.T) {
	config := standInConfig(t, "ready")
	config.Binary = "/no/such/driver"
	if _, err := StartProcess(t.Context(), config); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Start = %v, want ErrNotExist", err)
	}
	wantEmpty(t, os.TempDir())
}

func TestStartWithCanceledContext(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	reason := errors.New("no longer wanted")
	cancel(reason)
	if _, err := StartProcess(ctx, standInConfig(t, "ready")); !errors.Is(err, reason) {
		t.Errorf("Start = %v, want %v", err, reason)
	}
	wantEmpty(t, os.TempDir())
}

func TestStopReportsAnExitStatus(t *testing.T) {
	n := startStandIn(t, "fails at the end")
	if err := n.Stop(); err == nil || !strings.Contains(err.Error(), "exit status 7") {
		t.Errorf("Stop = %v, want the exit status", err)
	}
}

func TestTerminateKillsAfterTimeout(t *testing.T) {
	n := startStandIn(t, "deaf")
	p := n.child
	if err := p.terminate(50 * time.Millisecond); err == nil || !strings.Contains(err.Error(), "still running") {
		t.Errorf("terminate = %v", err)
	}
	if p.running() {
		t.Error("still running")
	}
	if err := n.Kill(); err != nil {
		t.Error(err)
	}
}

func TestChildDiesWithParent(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parent := exec.CommandContext(t.Context(), self)
	parent.Env = append(os.Environ(), behaviour+"=is a parent")
	output, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := output.Read(make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// The pipe ends when neither of them holds it any more; a child that lives on
	// is found by the test's timeout.
	if rest, err := io.ReadAll(output); err != nil || len(rest) > 0 {
		t.Errorf("after the parent's death: %q, %v", rest, err)
	}
	_ = parent.Wait()
}

func TestBinaryFromEnvironment(t *testing.T) {
	for name, binary := range map[string]func(context.Context, string) (string, error){"Binary": Binary, "StaticBinary": StaticBinary} {
		given := filepath.Join(t.TempDir(), "driver")
		t.Setenv(BinaryVariable, given)
		if got, err := binary(t.Context(), "/nowhere"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s = %q, %v; want ErrNotExist", name, got, err)
		}
		if err := os.WriteFile(given, nil, 0o755); err != nil {
			t.Fatal(err)
		}
		if got, err := binary(t.Context(), "/nowhere"); got != given || err != nil {
			t.Errorf("%s = %q, %v; want %q", name, got, err, given)
		}
	}
}

func TestBuild(t *testing.T) {
	dir := t.TempDir()
	program, err := build(t.Context(), "kubevirt.io/hostpath-provisioner/test/drivertest/testdata/hello", dir, false)
	if err != nil {
		t.Fatal(err)
	}
	if output, err := exec.CommandContext(t.Context(), program).Output(); err != nil || string(output) != "hello\n" {
		t.Errorf("the program built said %q, %v", output, err)
	}
	info, err := buildinfo.ReadFile(program)
	if err != nil || !slices.Contains(info.Settings, debug.BuildSetting{Key: "CGO_ENABLED", Value: "0"}) {
		t.Errorf("the program was built with %v, %v; want it to be static", info, err)
	}
	if _, err := build(t.Context(), "kubevirt.io/hostpath-provisioner/no/such/program", dir, false); err == nil || !strings.Contains(err.Error(), "no/such/program") {
		t.Errorf("build = %v", err)
	}
}

func TestLogTail(t *testing.T) {
	for _, test := range []struct {
		text  string
		lines int
		want  string
	}{
		{"", 2, ""},
		{"a\n", 2, "a"},
		{"a\nb\n", 2, "a\nb"},
		{"a\nb\nc\n", 2, "b\nc"},
		{"a\nb\nc", 1, "c"},
		{"\n\na", 2, "\na"},
	} {
		var also strings.Builder
		l := logBuffer{also: &also}
		if _, err := l.Write([]byte(test.text)); err != nil || also.String() != test.text {
			t.Errorf("copied %q, %v; want %q", also.String(), err, test.text)
		}
		if got := l.tail(test.lines); got != test.want {
			t.Errorf("tail(%d) of %q = %q, want %q", test.lines, test.text, got, test.want)
		}
	}
}

func wantEmpty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 0 {
		t.Errorf("left behind in %s: %v, %v", dir, entries, err)
	}
}
