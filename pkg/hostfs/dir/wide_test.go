package dir_test

import (
	"context"
	"errors"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// makeWide makes a tree of which so many directories are just so deep that each of them is moved up before it is removed.
func makeWide(t *testing.T, root *dir.Dir, directories int) {
	t.Helper()
	at := high(t, child(t, root, "tree"), 63)
	for i := range directories {
		must.Succeed(t, unix.Mkdirat(at.Fd(), strconv.Itoa(i), 0o700))
	}
}

// A tenant makes as many deep directories as it likes: what removes them remembers none of their names.
func TestRemoveTree_manyDeepDirectoriesTakeNoMemory(t *testing.T) {
	root := open(t, testenv.Tmpfs(t, 256<<20))
	makeWide(t, root, 20_000)
	heap := func() uint64 {
		var stats runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&stats)
		return stats.HeapAlloc
	}
	before, most, entries := heap(), uint64(0), 0
	must.Succeed(t, root.RemoveTree(t.Context(), "tree", func(context.Context) error {
		if entries++; entries%10_000 == 0 {
			most = max(most, heap())
		}
		return nil
	}))
	if most > before+300<<10 {
		t.Errorf("removing 20,000 deep directories took %d KiB of memory", (most-before)>>10)
	}
}

// A removal in turns does not try again the names that earlier turns have given. XFS lists the oldest entries of a directory first:
// there all are moved up before the first of them is removed.
func TestRemoveTree_manyDeepDirectoriesInTurns(t *testing.T) {
	root := open(t, testenv.LoopFS(t, "xfs", 300<<20))
	cpu := func(most int) time.Duration {
		t.Helper()
		makeWide(t, root, 3_000)
		var begun, ended syscall.Rusage
		must.Succeed(t, syscall.Getrusage(syscall.RUSAGE_SELF, &begun))
		for err := error(context.Canceled); err != nil; {
			ctx, end := context.WithCancel(t.Context())
			left := most
			err = root.RemoveTree(ctx, "tree", func(ctx context.Context) error {
				if left--; left < 0 {
					end()
				}
				return ctx.Err()
			})
			end()
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
		}
		must.Succeed(t, syscall.Getrusage(syscall.RUSAGE_SELF, &ended))
		return time.Duration(ended.Utime.Nano() + ended.Stime.Nano() - begun.Utime.Nano() - begun.Stime.Nano())
	}
	whole, turns := cpu(1<<30), cpu(72)
	if turns > 8*whole {
		t.Errorf("removing 3,000 deep directories took %v of CPU time in turns, and %v as a whole", turns, whole)
	}
}
