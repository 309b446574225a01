package main

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// By default the garbage collector lets the heap double (GOGC=100), so the index of the volumes
// would cost its memory twice. The default suits heaps that are slow to scan; the index of a
// pool has hardly any pointers, so collecting more often is cheap and the garbage can stay
// constant however many volumes there are.

const (
	// garbage is how many bytes of garbage may pile up: what the collector allows a small heap.
	garbage = 4 << 20
	// whilePoolsOpen is how often the heap is measured while pools open and it grows; later
	// is how often afterwards.
	whilePoolsOpen, later = 20 * time.Millisecond, 10 * time.Second
)

// boundGarbage adjusts GOGC to the live heap until ctx ends, so that garbage does not grow with
// it. It does nothing if the user sets GOGC (pkg.go.dev/runtime).
func boundGarbage(ctx context.Context, poolsOpen <-chan struct{}, inUse func() uint64) {
	if os.Getenv("GOGC") != "" {
		return
	}
	tick := time.NewTicker(whilePoolsOpen)
	defer tick.Stop()
	for current := 100; ; {
		// SetGCPercent stops the world: call it only for a change.
		if percent := garbagePercent(inUse()); percent != current {
			debug.SetGCPercent(percent)
			current = percent
		}
		select {
		case <-poolsOpen:
			poolsOpen = nil
			tick.Reset(later)
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// garbagePercent is the GOGC for a live heap of that many bytes, in steps of ten.
func garbagePercent(inUse uint64) int {
	percent := 100 * garbage / max(inUse, garbage)
	return int(max(10, percent/10*10))
}

// heapInUse is the size of the live heap after the last collection, in bytes.
func heapInUse() uint64 {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	return live[0].Value.Uint64()
}
