package clone_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Copying a tower of directories, with names as long as can be, takes processor time for each of its levels, and not for each level
// and all those above.
func TestTowerTakesProcessorTimeByItsHeight(t *testing.T) {
	levels := 20_000
	if testing.Short() {
		levels = 4000
	}
	root := testenv.LoopFS(t, "xfs", 2<<30)
	half := copyTower(t, filepath.Join(root, "half"), levels/2)
	whole := copyTower(t, filepath.Join(root, "whole"), levels)
	ratio := float64(whole) / float64(half)
	t.Logf("%s for %d levels, %s for %d: %.2f times", whole, levels, half, levels/2, ratio)
	// A path from the root for each level would make it four times.
	if ratio > 2.6 {
		t.Errorf("twice as many levels take %.2f times the processor time", ratio)
	}
}

// copyTower copies one as a pod's that is frozen for that, and removes the copy. It returns the processor time of both.
func copyTower(t *testing.T, at string, levels int) time.Duration {
	t.Helper()
	src, dst := filepath.Join(at, "src"), filepath.Join(at, "dst")
	must.Succeed(t, os.MkdirAll(src, 0o755), os.Mkdir(dst, 0o700))
	tower(t, src, levels)
	awaitTick(t, at)
	before := processorTime(t)
	result := tree(t, src, dst, clone.Options{Rounds: 1})
	took := processorTime(t) - before
	if result.Entries != int64(levels) || !result.PointInTime {
		t.Errorf("it is %+v, want %d directories", result, levels)
	}
	return took
}

func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var used unix.Rusage
	must.Succeed(t, unix.Getrusage(unix.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
