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

func TestGarbagePercent(t *testing.T) {
	for inUse, want := range map[uint64]int{
		0:          100, // the collector's default
		garbage:    100,
		8 << 20:    50,
		9 << 20:    40,
		40 << 20:   10,
		1000 << 20: 10, // lower would collect all the time
	} {
		if got := garbagePercent(inUse); got != want {
			t.Errorf("%d%% with %d bytes in use, want %d%%", got, inUse, want)
		}
	}
}

// percentNow is the current GOGC.
func percentNow() int {
	now := debug.SetGCPercent(100)
	debug.SetGCPercent(now)
	return now
}

func TestBoundGarbageFollowsLiveHeap(t *testing.T) {
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

func TestBoundGarbageRespectsGOGC(t *testing.T) {
	t.Setenv("GOGC", "77")
	defer debug.SetGCPercent(debug.SetGCPercent(77))
	boundGarbage(context.Background(), nil, func() uint64 { t.Error("the heap was measured"); return 40 << 20 })
	if percentNow() != 77 {
		t.Errorf("GOGC is %d%%, want 77%%", percentNow())
	}
}

func TestHeapInUse(t *testing.T) {
	held := make([]byte, 32<<20)
	runtime.GC()
	if got := heapInUse(); got < 32<<20 {
		t.Errorf("%d bytes in use, want at least 32 MiB", got)
	}
	runtime.KeepAlive(held)
}
