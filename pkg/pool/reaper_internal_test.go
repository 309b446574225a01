package pool

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestTheReaperLeavesMostOfTheTimeToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const removals, each = 1600, time.Millisecond
		p, start := &pace{done: new(atomic.Uint64)}, time.Now()
		longest := time.Duration(0)
		for worked := time.Duration(0); worked < removals*each; worked += each {
			before := time.Now()
			if err := p.step(t.Context()); err != nil {
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

func TestARestEndsWithTheReaper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), time.Hour)
		defer stop()
		p := &pace{done: new(atomic.Uint64)}
		var err error
		for err == nil {
			err = p.step(ctx)
			time.Sleep(time.Minute)
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v, want the end of the context", err)
		}
	})
}
