package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// useDriver builds the driver once for all demos of a test, and gives them a
// temporary directory that has to be empty at the end.
func useDriver(t *testing.T) (tmp string) {
	t.Helper()
	testenv.NeedRoot(t)
	binary, err := drivertest.Binary(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(drivertest.BinaryVariable, binary)
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

func TestDemoWithoutPrograms(t *testing.T) {
	useDriver(t)
	// Its reserved blocks are free but not available, which must not be promised.
	tmp := filepath.Join(testenv.LoopFS(t, "ext4", 4<<30), "tmp")
	if err := os.Mkdir(tmp, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", tmp)
	t.Setenv("PATH", t.TempDir()) // no mkfs
	var out strings.Builder
	if err := demonstrate(t.Context(), newTable(&out, false)); err != nil {
		t.Errorf("%v\n%s", err, out.String())
	}
	for _, want := range []string{
		"missing on this machine: mkfs.xfs.\n",
		"missing on this machine: mkfs.btrfs.\n",
		"A node with one storage pool: a directory.\n",
		"Sizes are not enforced: ",
		"not tried: sizes are not enforced",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it is not said: %q\n%s", want, out.String())
		}
	}
	wantNothingLeft(t, tmp)
}

func TestInterruptedDemoCleansUp(t *testing.T) {
	tmp := useDriver(t)
	for _, at := range []string{"A node with", steps[0].what, "Mount it for a pod", "That pod fills it", "Mount the first read-only", "The machine writes", "Crash the driver", "Unmount the pod"} {
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

func TestWrongAnswerStopsDemo(t *testing.T) {
	var out strings.Builder
	wrong := step{what: "Ask", call: "Probe", run: func(*scene, context.Context) (answer, error) {
		return answer{}, errors.New("got NOT_FOUND, want OK")
	}}
	err := new(scene).show(t.Context(), newTable(&out, false), wrong)
	if err == nil || err.Error() != "Ask (Probe): got NOT_FOUND, want OK" || !strings.Contains(out.String(), "not as it should be") {
		t.Errorf("show = %v, row %q", err, out.String())
	}
}

func TestRefusedWith(t *testing.T) {
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

func TestFillUsesAllSpace(t *testing.T) {
	const room = 1 << 20
	file, err := os.Create(filepath.Join(testenv.Tmpfs(t, room), "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if written, err := fill(file); written != room || err != nil {
		t.Errorf("fill = %d, %v, want %d", written, err, room)
	}
}

func TestFillReturnsOtherErrors(t *testing.T) {
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if written, err := fill(file); written != 0 || !errors.Is(err, syscall.EBADF) {
		t.Errorf("fill of what is open for reading = %d, %v, want EBADF", written, err)
	}
}

func TestAsPodDropsSysResource(t *testing.T) {
	var inside []byte
	err := asPod(func() (err error) {
		inside, err = os.ReadFile("/proc/thread-self/status")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var effective uint64
	for line := range strings.Lines(string(inside)) {
		if set, ok := strings.CutPrefix(line, "CapEff:"); ok {
			if effective, err = strconv.ParseUint(strings.TrimSpace(set), 16, 64); err != nil {
				t.Fatal(err)
			}
		}
	}
	if effective&(1<<unix.CAP_SYS_RESOURCE) != 0 {
		t.Errorf("the capabilities are %x, with CAP_SYS_RESOURCE", effective)
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
