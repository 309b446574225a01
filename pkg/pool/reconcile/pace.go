package reconcile

import (
	"context"
	"sync/atomic"
	"time"
)

// A Pace bounds the share of the disk that background work takes: after each burst of work it
// rests for several times as long as the burst took.
type Pace struct {
	// Done counts all steps.
	Done *atomic.Uint64

	began time.Time
	steps int
}

const (
	// Burst is how many removals come between two rests. What they leave to the journal
	// is what the next call that syncs has to wait for.
	Burst = 16
	// idle is how many times as long as a burst the rest after it is. Filesystems do a
	// part of the work of a removal later, in threads of their own, which the time of the
	// burst does not show.
	idle = 3
	// longestPause bounds that rest: a disk that hung in the midst of a burst needs none
	// that is as long.
	longestPause = time.Second
)

// Step is called before each step of the work, and rests after a burst. It returns the error of
// ctx once that ends.
func (p *Pace) Step(ctx context.Context) error {
	p.Done.Add(1)
	if p.began.IsZero() {
		p.began = time.Now()
	}
	if p.steps++; p.steps < Burst {
		return ctx.Err()
	}
	err := Rest(ctx, min(idle*time.Since(p.began), longestPause))
	p.steps, p.began = 0, time.Now()
	return err
}

// Rest waits for so long, unless ctx ends.
func Rest(ctx context.Context, how time.Duration) error {
	if how <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(how)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
