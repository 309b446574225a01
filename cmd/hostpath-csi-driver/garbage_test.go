package main

import (
	"context"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestGarbageDoesNotGrowWithWhatIsInUse(t *testing.T) {
	for inUse, want := range map[uint64]int{
		0:          100, // what the collector does by itself
		garbage:    100,
		8 << 20:    50,
		9 << 20:    40,
		40 << 20:   10,
		1000 << 20: 10, // or it would do nothing else
	} {
		if got := garbagePercent(inUse); got != want {
			t.Errorf("%d%% with %d bytes in use, want %d%%", got, inUse, want)
		}
	}
}

// percentNow is what the collector was told last.
func percentNow() int {
	now := debug.SetGCPercent(100)
	debug.SetGCPercent(now)
	return now
}

func TestTheCollectorIsToldWhatIsInUse(t *testing.T) {
	t.Setenv("GOGC", "")
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	synctest.Test(t, func(t *testing.T) {
		var inUse atomic.Uint64
		poolsOpen := make(chan struct{})
		go boundGarbage(t.Context(), poolsOpen, inUse.Load)
		after := func(d time.Duration, bytes uint64, want int) {
			t.Helper()
			inUse.Store(bytes)
			time.Sleep(d) // the bubble's time
			synctest.Wait()
			if got := percentNow(); got != want {
				t.Errorf("%d%% with %d bytes in use, want %d%%", got, bytes, want)
			}
		}
		after(whilePoolsOpen, 1<<20, 100)
		after(whilePoolsOpen, 8<<20, 50)
		close(poolsOpen)
		synctest.Wait()
		after(whilePoolsOpen, 40<<20, 50)
		after(later, 40<<20, 10)
		after(later, 1<<20, 100)
	})
}

func TestGOGCOfTheEnvironmentStays(t *testing.T) {
	t.Setenv("GOGC", "77")
	defer debug.SetGCPercent(debug.SetGCPercent(77))
	boundGarbage(context.Background(), nil, func() uint64 { t.Error("the heap is measured"); return 40 << 20 })
	if percentNow() != 77 {
		t.Errorf("%d%%, want that of GOGC", percentNow())
	}
}

func TestWhatIsInUseIsMeasured(t *testing.T) {
	held := make([]byte, 32<<20)
	runtime.GC()
	if got := heapInUse(); got < 32<<20 {
		t.Errorf("%d bytes in use, want those that are held", got)
	}
	runtime.KeepAlive(held)
}
