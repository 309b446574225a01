package main

import (
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

func TestDemo(t *testing.T) {
	testenv.NeedRoot(t)
	t.Setenv(drivertest.BinaryVariable, drivertest.Built(t))
	// Its reserved blocks are free but not available, which must not be promised.
	tmp := filepath.Join(testenv.LoopFS(t, "ext4", 12<<30), "tmp")
	must.Succeed(t, os.Mkdir(tmp, 0o755))
	t.Setenv("TMPDIR", tmp)
	interrupted := errors.New("interrupted")
	for name, tt := range map[string]struct {
		path, want string
		at         string // is printed when it is interrupted
		err        error
	}{
		"on a filesystem":                    {os.Getenv("PATH"), "in a loop file of 8.0 GiB", "", nil},
		"in a directory, without mkfs there": {t.TempDir(), "left out: sizes are not enforced", "", nil},
		"interrupted":                        {os.Getenv("PATH"), "", "Publish it for a virtual machine", interrupted},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("PATH", tt.path)
			ctx, cancel := context.WithCancelCause(t.Context())
			out := &output{at: tt.at, interrupt: func() { cancel(interrupted) }}
			err := run(ctx, out)
			if !errors.Is(err, tt.err) || !strings.Contains(out.String(), tt.want) || strings.HasSuffix(out.String(), "Nothing was left behind.\n") != (err == nil) {
				t.Errorf("%v, or %q is not there, or not the end:\n%s", err, tt.want, out.String())
			}
			mounts, err := mountns.Below(tmp)
			must.Succeed(t, err)
			entries, err := os.ReadDir(tmp)
			must.Succeed(t, err)
			if len(mounts)+len(entries) > 0 {
				t.Errorf("left behind: mounts %q, files %v", mounts, entries)
			}
		})
	}
}

// An output interrupts as soon as what it waits for is written.
type output struct {
	strings.Builder
	at        string
	interrupt func()
}

func (o *output) Write(p []byte) (int, error) {
	if o.at != "" && strings.Contains(string(p), o.at) {
		o.interrupt()
	}
	return o.Builder.Write(p)
}
