package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/node"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// useDriver builds the driver once for all demos of a test, and gives them a
// temporary directory that has to be empty at the end.
func useDriver(t *testing.T) (tmp string) {
	t.Helper()
	testenv.NeedRoot(t)
	binary, err := node.Binary(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(node.BinaryVariable, binary)
	tmp = t.TempDir()
	t.Setenv("TMPDIR", tmp)
	return tmp
}

func wantNothingLeft(t *testing.T, tmp string) {
	t.Helper()
	if err := leftovers(tmp); err != nil {
		t.Error(err)
	}
	if mounts, err := mountns.Below(tmp); err != nil || len(mounts) > 0 {
		t.Errorf("mounts left behind: %q, %v", mounts, err)
	}
	if entries, err := os.ReadDir(tmp); err != nil || len(entries) > 0 {
		t.Errorf("files left behind: %v, %v", entries, err)
	}
}

func TestDemo(t *testing.T) {
	tmp := useDriver(t)
	var out strings.Builder
	if err := demonstrate(t.Context(), newTable(&out, false)); err != nil {
		t.Errorf("%v\n%s", err, out.String())
	}
	for _, step := range steps {
		if !strings.Contains(out.String(), step.what) {
			t.Errorf("the step %q is not shown", step.what)
		}
	}
	if !strings.HasSuffix(out.String(), "Nothing was left behind.\n") {
		t.Errorf("the demo ends otherwise than expected:\n%s", out.String())
	}
	wantNothingLeft(t, tmp)
}

func TestDemoWithoutXFS(t *testing.T) {
	useDriver(t)
	// Its reserved blocks are free but not available, which must not be promised.
	tmp := filepath.Join(testenv.LoopFS(t, "ext4", 4<<30), "tmp")
	if err := os.Mkdir(tmp, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", tmp)
	t.Setenv("PATH", t.TempDir()) // no mkfs.xfs
	var out strings.Builder
	if err := demonstrate(t.Context(), newTable(&out, false)); err != nil {
		t.Errorf("%v\n%s", err, out.String())
	}
	for _, want := range []string{"missing on this machine: mkfs.xfs\n", "A node with one storage pool: a directory.\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it is not said: %q\n%s", want, out.String())
		}
	}
	wantNothingLeft(t, tmp)
}

func TestAnInterruptedDemoLeavesNothing(t *testing.T) {
	tmp := useDriver(t)
	for _, at := range []string{"A node with", steps[0].what, "Mount it for a pod", "Mount it read-only", "Crash the driver", "Unmount the pod"} {
		t.Run(at, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			out := &interrupter{at: at, interrupt: func() { cancel(interrupted{syscall.SIGINT}) }}
			err := demonstrate(ctx, newTable(out, false))
			if !errors.Is(err, interrupted{syscall.SIGINT}) {
				t.Errorf("the demo ended with %v", err)
			}
			if strings.Contains(out.String(), "Nothing was left behind") {
				t.Error("the demo went on to its end")
			}
			wantNothingLeft(t, tmp)
		})
	}
}

// An interrupter interrupts as soon as it is written what it waits for.
type interrupter struct {
	bytes.Buffer
	at        string
	interrupt func()
}

func (i *interrupter) Write(p []byte) (int, error) {
	if strings.Contains(string(p), i.at) {
		i.interrupt()
	}
	return i.Buffer.Write(p)
}

func TestAWrongAnswerIsShownAndEndsTheDemo(t *testing.T) {
	var out strings.Builder
	wrong := step{what: "Ask", call: "Probe", run: func(*scene, context.Context) (answer, error) {
		return answer{}, errors.New("got NOT_FOUND, want OK")
	}}
	err := new(scene).show(t.Context(), newTable(&out, false), wrong)
	if err == nil || err.Error() != "Ask (Probe): got NOT_FOUND, want OK" || !strings.Contains(out.String(), "not as it should be") {
		t.Errorf("show = %v, row %q", err, out.String())
	}
}

func TestNeededRefusals(t *testing.T) {
	for name, test := range map[string]struct {
		got  error
		good bool
	}{
		"the right one":        {&os.PathError{Op: "open", Path: "/x", Err: syscall.EROFS}, true},
		"another":              {syscall.EACCES, false},
		"none, which is wrong": {nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := refusedWith(test.got, syscall.EROFS); (err == nil) != test.good {
				t.Errorf("refusedWith(%v) = %v", test.got, err)
			}
		})
	}
}

func TestUntilSignal(t *testing.T) {
	ctx, stop := untilSignal(t.Context())
	defer stop()
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
	if got := context.Cause(ctx); !errors.Is(got, interrupted{syscall.SIGTERM}) {
		t.Errorf("the context ended with %v", got)
	}
}
