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

// build makes this program, static.
func build(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".")
	// As make test-kernel has it. A race detector in the guest's first process
	// would find nothing, slowly.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, output)
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
	return tool{build(t), t.TempDir()}
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

// programFile makes a file that may be run.
func programFile(t *testing.T, name, content string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
	return file
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
