package main

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// By itself the garbage collector lets a heap double, and so takes as much memory again as
// the driver remembers of its volumes. That is meant for heaps that take long to look
// through. The index of a pool has hardly any pointers to follow, so that the driver can do
// with the same garbage however many volumes there are.

const (
	// garbage is how much may pile up, in bytes: what the collector lets a small heap have.
	garbage = 4 << 20
	// whilePoolsOpen is how often the heap is measured as long as it grows, and later the
	// same for the rest of the time.
	whilePoolsOpen, later = 20 * time.Millisecond, 10 * time.Second
)

// boundGarbage has garbage not grow with what is in use, until ctx ends. Whoever sets GOGC
// (pkg.go.dev/runtime) knows better.
func boundGarbage(ctx context.Context, poolsOpen <-chan struct{}, inUse func() uint64) {
	if os.Getenv("GOGC") != "" {
		return
	}
	tick := time.NewTicker(whilePoolsOpen)
	defer tick.Stop()
	for told := 100; ; {
		// To tell it stops all else for a moment.
		if percent := garbagePercent(inUse()); percent != told {
			debug.SetGCPercent(percent)
			told = percent
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

// garbagePercent is how much more than what is in use the heap may have, in steps of ten.
func garbagePercent(inUse uint64) int {
	percent := 100 * garbage / max(inUse, garbage)
	return int(max(10, percent/10*10))
}

// heapInUse is what the last collection left, in bytes.
func heapInUse() uint64 {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	return live[0].Value.Uint64()
}
