package reconcile_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
)

func TestReaperPausesInProportion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const removals, each = 1600, time.Millisecond
		p, start := &reconcile.Pace{Done: new(atomic.Uint64)}, time.Now()
		longest := time.Duration(0)
		for worked := time.Duration(0); worked < removals*each; worked += each {
			before := time.Now()
			if err := p.Step(t.Context()); err != nil {
				t.Fatal(err)
			}
			longest = max(longest, time.Since(before))
			time.Sleep(each)
		}
		if took := time.Since(start); took < 39*removals*each/10 || took > 4*removals*each {
			t.Errorf("%d removals of %v took %v in all, want some four times as long as they take", removals, each, took)
		}
		if longest > 50*time.Millisecond {
			t.Errorf("it rests for %v at a time, want short rests", longest)
		}
	})
}

// A hang is no work, and what comes after it is not held up for longer.
func TestReaperPauseIsBoundedAfterHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &reconcile.Pace{Done: new(atomic.Uint64)}
		for i := range reconcile.Burst {
			if i == reconcile.Burst/2 {
				time.Sleep(time.Hour)
			}
			before := time.Now()
			if err := p.Step(t.Context()); err != nil {
				t.Fatal(err)
			}
			if rested := time.Since(before); rested > time.Second || i == reconcile.Burst-1 && rested == 0 {
				t.Errorf("it rests for %v after removal %d, want a second at most, and a rest after the last", rested, i+1)
			}
		}
	})
}

func TestReaperPauseEndsAtClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const each, end = 20 * time.Millisecond, 700 * time.Millisecond // in the rest after the first burst
		ctx, stop := context.WithTimeout(t.Context(), end)
		defer stop()
		p, start := &reconcile.Pace{Done: new(atomic.Uint64)}, time.Now()
		var err error
		for range reconcile.Burst {
			time.Sleep(each)
			err = p.Step(ctx)
		}
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took != end {
			t.Errorf("%v after %v, want the end of the context after %v", err, took, end)
		}
	})
}
