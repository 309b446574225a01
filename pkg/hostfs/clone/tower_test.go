package clone_test

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Copying a tower of directories, with names as long as can be, takes processor time for each of its levels, and not for each level
// and all those above. No name stays in memory.
func TestTowerTakesProcessorTimeByItsHeight(t *testing.T) {
	levels := 20_000
	if testing.Short() {
		levels = 8000
	}
	const times = 8
	root := testenv.LoopFS(t, "xfs", 2<<30)
	low, lowHeap := copyTower(t, filepath.Join(root, "low"), levels/times)
	high, highHeap := copyTower(t, filepath.Join(root, "high"), levels)
	ratio := float64(high) / float64(low)
	t.Logf("%s for %d levels, %s for %d: %.1f times", high, levels, low, levels/times, ratio)
	// A path from the root for each level makes it some 18 times, and 25 for 20,000 levels.
	if ratio > 1.5*times {
		t.Errorf("%d times as many levels take %.1f times the processor time", times, ratio)
	}
	t.Logf("%d KiB of memory, and %d KiB", highHeap>>10, lowHeap>>10)
	// What is compared afterwards is kept of each, and no name.
	if highHeap > lowHeap+128*uint64(levels) {
		t.Errorf("%d levels take %d KiB of memory, and %d take %d KiB", levels, highHeap>>10, levels/times, lowHeap>>10)
	}
}

// copyTower makes one and copies it. It returns the processor time of the copy, and the most that was on the heap at some of its entries.
func copyTower(t *testing.T, at string, levels int) (took time.Duration, most uint64) {
	t.Helper()
	src, dst := filepath.Join(at, "src"), filepath.Join(at, "dst")
	must.Succeed(t, os.MkdirAll(src, 0o755), os.Mkdir(dst, 0o700))
	tower(t, src, levels)
	awaitTick(t, at)
	entries := 0
	before := processorTime(t)
	result := tree(t, src, dst, clone.Options{Rounds: 1, Pause: func(context.Context) error {
		if entries++; entries%(levels/4) == 0 {
			most = max(most, heap())
		}
		return nil
	}})
	took = processorTime(t) - before
	if result.Entries != int64(levels) || !result.PointInTime {
		t.Errorf("it is %+v, want %d directories", result, levels)
	}
	return took, most
}

func heap() uint64 {
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var used unix.Rusage
	must.Succeed(t, unix.Getrusage(unix.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
