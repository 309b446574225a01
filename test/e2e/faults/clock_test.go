package faults

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// What is written after the clock was set back seems older than the pass that is under way, and the next one would leave it out.
func TestClockSetBackWhileTreeIsCopied(t *testing.T) {
	if !testenv.Guest() {
		t.Skip("only the guest of test/cmd/kernel has a clock of its own")
	}
	root := testenv.LoopFS(t, "ext4", 64<<20)
	src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
	must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
	file := filepath.Join(src, "file")
	must.Succeed(t, os.WriteFile(file, nil, 0o600))
	const hour, back = 3600, 10
	turnClock(t, hour) // All that the copy starts with is older than what the clock is set back to.
	defer turnClock(t, back-hour)
	pass := 0
	result, err := clone.Tree(t.Context(), openDir(t, src), openDir(t, dst), clone.Options{
		Method: clone.Copy, Rounds: 1,
		Pause: func(context.Context) error { // once in each pass, for the file has no data yet
			switch pass++; pass {
			case 1:
				must.Succeed(t, os.Chmod(file, 0o644))
			case 2:
				turnClock(t, -back)
			}
			return nil
		},
		Hold: func(ctx context.Context) (context.Context, func() error, error) {
			must.Succeed(t, os.WriteFile(file, []byte("written after the clock was set back"), 0o600))
			return ctx, func() error { return nil }, nil
		},
	})
	if pass < 2 {
		t.Fatalf("there was no second pass: %+v, %v", result, err)
	}
	if err != nil || result.PointInTime || result.Changed == 0 {
		t.Errorf("%+v, %v; want everything to count as changed", result, err)
	}
}

// turnClock sets the clock of the machine, by so many seconds (adjtimex(2), Linux 2.6.39).
func turnClock(t *testing.T, seconds int64) {
	t.Helper()
	must.Succeed(t, must.Err(unix.Adjtimex(&unix.Timex{Modes: unix.ADJ_SETOFFSET, Time: unix.Timeval{Sec: seconds}})))
}

func openDir(t *testing.T, path string) *dir.Dir {
	t.Helper()
	d := must.Value(dir.Open(path))(t)
	t.Cleanup(func() { _ = d.Close() })
	return d
}
