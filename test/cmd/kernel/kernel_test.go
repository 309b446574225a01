package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// build makes a static program of a package of this module.
func build(t *testing.T, verb []string, of string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	cmd := exec.CommandContext(t.Context(), "go", append(verb, "-o", program, of)...)
	// As make test-kernel has it. A race detector in the guest's first process
	// would find nothing, slowly.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", of, err, output)
	}
	return program
}

// A tool is this program, with a temporary directory of its own that has to be
// empty in the end.
type tool struct{ program, tmp string }

func newTool(t *testing.T) tool {
	t.Helper()
	testenv.NeedTime(t)
	if err := checkTools(); err != nil {
		testenv.Missing(t, err.Error())
	}
	return tool{build(t, []string{"build"}, "."), t.TempDir()}
}

func (k tool) command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), k.program, args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+k.tmp, "FROM_THE_HOST=yes")
	t.Cleanup(func() {
		if left, err := os.ReadDir(k.tmp); err != nil || len(left) > 0 {
			t.Errorf("left behind: %v, %v", left, err)
		}
	})
	return cmd
}

// run returns what the tool printed, on each of its outputs, and its exit status.
func (k tool) run(t *testing.T, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	var out, complaint bytes.Buffer
	cmd := k.command(t, args...)
	cmd.Stdout, cmd.Stderr = &out, &complaint
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return out.String(), complaint.String(), cmd.ProcessState.ExitCode()
}

func TestGuestEnvironment(t *testing.T) {
	k := newTool(t)
	tests := build(t, []string{"test", "-c"}, "./lab")
	for what, mode := range map[string][]string{
		"with SELinux":    {"--selinux=on"},
		"without SELinux": {"--selinux=off"},
		"for containers":  {"--selinux=off", "--containers"},
	} {
		t.Run(what, func(t *testing.T) {
			stdout, stderr, status := k.run(t, append(mode, "--env=CI", tests, "-test.v")...)
			if status != 0 || !strings.Contains(stdout, "PASS: TestProjectQuotaOnXFSAndExt4") {
				t.Errorf("exit status %d\n%s%s", status, stdout, stderr)
			}
		})
	}
}

func TestSeveralProgramsInOneBoot(t *testing.T) {
	k := newTool(t)
	talk := programFile(t, "talk", `#!/bin/sh
echo "a word from $PWD, $FROM_THE_HOST, $ALONE, $(cat data)"
echo a complaint >&2
mkdir /out/dir && cat /add/absolute >/out/dir/file
sleep 1000 &
`)
	data := filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(data, []byte("some data"), 0o644); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "out")
	stdout, stderr, status := k.run(t, "--out", out, "--env", "FROM_THE_HOST",
		"--add", data+":talk/data", "--add", data+":/add/absolute",
		"--run", "true",
		"--run", "ALONE=alone "+talk,
		"--run", programFile(t, "seven", "#!/bin/sh\nps -o args; exit 7\n"),
		"--run", programFile(t, "killed", "#!/bin/sh\nkill -TERM $$\n"),
		"--run", lookUp("printf")+" dynamic",
		"--run", "no-such-program",
		"--run", "false")

	if want := 128 + int(syscall.SIGTERM); status != want {
		t.Errorf("exit status %d, want %d", status, want)
	}
	for _, want := range []string{">>> true\n", "a word from /work/talk, yes, alone, some data\n", "dynamic"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("the output lacks %q:\n%s", want, stdout)
		}
	}
	if strings.Contains(stdout, "sleep") {
		t.Errorf("a program found another's processes:\n%s", stdout)
	}
	for _, want := range []string{
		"a complaint\n", "talk left processes running, which were killed: 1\n",
		"s  passed              true\n", "s  exit status 7       /", "s  ended by terminated /", "s  passed              /usr/bin/printf dynamic\n",
		"s  exit status 127     no-such-program\n", "s  exit status 1       false\n",
	} {
		if !strings.Contains(stderr, want) {
			t.Errorf("the complaints lack %q:\n%s", want, stderr)
		}
	}
	if content, err := os.ReadFile(filepath.Join(out, "dir/file")); err != nil || string(content) != "some data" {
		t.Errorf("/out came back with %q, %v", content, err)
	}
}

func TestTimeout(t *testing.T) {
	k := newTool(t)
	if _, stderr, status := k.run(t, "--timeout=1s", "sleep", "1000"); status != statusTimeout || !strings.Contains(stderr, "the time is up after 1s") {
		t.Errorf("exit status %d: %s", status, stderr)
	}
}

func TestMachineFailureIsNotTestFailure(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-hard has it: each machine takes seconds to boot")
	}
	k := newTool(t)
	for what, test := range map[string]struct{ args, want string }{
		"too small to boot": {"--memory=64 true", "said last"},
		"no emulator":       {"--cpus=100000 true", "emulator: exit status"},
		"no such kernel":    {"--kernel=/no/such/kernel.deb true", "/no/such/kernel.deb"},
		"a wrong option":    {"--wrong", "not defined"},
	} {
		t.Run(what, func(t *testing.T) {
			if _, stderr, status := k.run(t, strings.Fields(test.args)...); status != statusFailed || !strings.Contains(stderr, test.want) {
				t.Errorf("exit status %d: %s", status, stderr)
			}
		})
	}
}

func TestProcessesEndWithTool(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-hard has it: each machine takes seconds to boot")
	}
	k := newTool(t)
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(signal.String(), func(t *testing.T) {
			cmd := k.command(t, "sh", "-c", "echo I live; sleep 1000")
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			emulator := emulatorOf(t, cmd.Process.Pid)
			if signal == syscall.SIGTERM {
				// What is printed comes at once. One wait for it is enough.
				if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "I live\n" {
					t.Fatalf("the first line is %q, %v", line, err)
				}
			}
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, stdout)
			err = cmd.Wait()
			if status := cmd.ProcessState.ExitCode(); signal != syscall.SIGKILL && status != 128+int(signal) {
				t.Errorf("exit status %d: %v", status, err)
			}
			if !gone(emulator) {
				t.Errorf("the emulator, process %s, still runs", emulator)
			}
		})
	}
}

// emulatorOf waits until a process has an emulator as its child, and returns the
// number of that.
func emulatorOf(t *testing.T, parent int) string {
	t.Helper()
	for t.Context().Err() == nil {
		// Its threads have lists of their own.
		lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", parent))
		if err != nil || len(lists) == 0 {
			t.Fatalf("process %d is gone: %v", parent, err)
		}
		for _, list := range lists {
			children, _ := os.ReadFile(list) // the thread may have ended
			for _, child := range strings.Fields(string(children)) {
				if name, err := os.ReadFile(filepath.Join("/proc", child, "comm")); err == nil && strings.HasPrefix(string(name), "qemu") {
					return child
				}
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("no emulator")
	return ""
}

// gone reports whether a process ends within a few seconds. A zombie has.
func gone(pid string) bool {
	for range 500 {
		stat, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) || strings.Contains(string(stat), ") Z ") {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}
