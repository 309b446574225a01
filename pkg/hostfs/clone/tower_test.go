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
		levels = 8000
	}
	const times = 8
	root := testenv.LoopFS(t, "xfs", 2<<30)
	low := copyTower(t, filepath.Join(root, "low"), levels/times)
	high := copyTower(t, filepath.Join(root, "high"), levels)
	ratio := float64(high) / float64(low)
	t.Logf("%s for %d levels, %s for %d: %.1f times", high, levels, low, levels/times, ratio)
	// A path from the root for each level makes it some 18 times, and 25 for 20,000 levels.
	if ratio > 1.5*times {
		t.Errorf("%d times as many levels take %.1f times the processor time", times, ratio)
	}
}

// copyTower makes one and copies it. It returns the processor time of the copy.
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
