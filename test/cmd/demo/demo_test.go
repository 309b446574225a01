package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// useDriver builds the driver once for all demos of a test, and gives them a temporary directory that has to be
// empty when each has ended.
func useDriver(t *testing.T) (tmp string) {
	t.Helper()
	testenv.NeedRoot(t)
	t.Setenv(drivertest.BinaryVariable, drivertest.Built(t))
	// Its reserved blocks are free but not available, which must not be promised.
	tmp = filepath.Join(testenv.LoopFS(t, "ext4", 12<<30), "tmp")
	must.Succeed(t, os.Mkdir(tmp, 0o755))
	t.Setenv("TMPDIR", tmp)
	return tmp
}

func wantNothingLeft(t *testing.T, tmp string) {
	t.Helper()
	if mounts, err := mountns.Below(tmp); err != nil || len(mounts) > 0 {
		t.Errorf("mounts left behind: %q, %v", mounts, err)
	}
	if entries, err := os.ReadDir(tmp); err != nil || len(entries) > 0 {
		t.Errorf("files left behind: %v, %v", entries, err)
	}
}

func TestDemo(t *testing.T) {
	tmp := useDriver(t)
	for name, tt := range map[string]struct{ path, want string }{
		"on a filesystem":                    {os.Getenv("PATH"), "in a loop file of 8.0 GiB"},
		"in a directory, without mkfs there": {t.TempDir(), "left out: sizes are not enforced"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("PATH", tt.path)
			var out strings.Builder
			if err := run(t.Context(), &out); err != nil || !strings.Contains(out.String(), tt.want) || !strings.HasSuffix(out.String(), "Nothing was left behind.\n") {
				t.Errorf("%v, or %q is not there, or not the end:\n%s", err, tt.want, out.String())
			}
			wantNothingLeft(t, tmp)
		})
	}
}

func TestInterruptedDemoCleansUp(t *testing.T) {
	tmp := useDriver(t)
	interrupted := errors.New("interrupted")
	ctx, cancel := context.WithCancelCause(t.Context())
	out := &interrupter{at: "Publish it for a virtual machine", interrupt: func() { cancel(interrupted) }}
	if err := run(ctx, out); !errors.Is(err, interrupted) {
		t.Errorf("the demo ended with %v", err)
	}
	wantNothingLeft(t, tmp)
}

// An interrupter interrupts as soon as what it waits for is written.
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
