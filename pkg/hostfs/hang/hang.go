// Package hang bounds how long a caller waits for a system call. Linux cannot interrupt a call
// that waits for a filesystem whose server is gone (state D in ps(1)), so the call runs in a
// goroutine of its own, which the caller abandons after a limit.
//
// An abandoned call keeps its goroutine, and the thread of its system call, until it returns.
// Abandoned counts them. Callers must not start another call on what hangs for each request
// that they get: they ask again only when the first has returned, or once in an interval.
package hang

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// ErrTimeout reports a call that did not return within its limit.
var ErrTimeout = errors.New("no answer")

var abandoned atomic.Int64

// Abandoned is how many calls of this process were abandoned and have not returned yet.
func Abandoned() int64 { return abandoned.Load() }

// Run returns what do returns. If that takes longer than limit, Run abandons it with
// ErrTimeout; if ctx ends first, with the cause. With a limit of 0 only ctx ends it. The
// result of an abandoned call goes to late, which may be nil: it has to release what the
// result holds, and runs in the goroutine of the call.
func Run[T any](ctx context.Context, limit time.Duration, do func() (T, error), late func(T, error)) (T, error) {
	c := Start(do)
	if err := c.await(ctx, limit); err != nil && c.Abandon(late) {
		var none T
		return none, err
	}
	return c.value, c.err
}

// A Call runs in a goroutine of its own.
type Call[T any] struct {
	done  chan struct{} // closed when value and err are set
	value T
	err   error

	mu        sync.Mutex
	abandoned bool
	late      func(T, error)
}

// Start starts a call. The caller has to Wait until it returns, however often that times out,
// or to Abandon it.
func Start[T any](do func() (T, error)) *Call[T] {
	c := &Call[T]{done: make(chan struct{})}
	go func() {
		growStack()
		c.value, c.err = do()
		c.mu.Lock()
		close(c.done)
		c.mu.Unlock()
		if !c.abandoned { // not set any more once done is closed
			return
		}
		abandoned.Add(-1)
		if c.late != nil {
			c.late(c.value, c.err)
		}
	}()
	return c
}

// Wait returns what the call returns, ErrTimeout after limit, or the cause of the end of ctx.
// The call goes on after both, and can be waited for again. A limit of 0 is none.
func (c *Call[T]) Wait(ctx context.Context, limit time.Duration) (T, error) {
	if err := c.await(ctx, limit); err != nil {
		var none T
		return none, err
	}
	return c.value, c.err
}

// WaitWhile is Wait for as long as steps, which counts what the call has done, changes within each limit. After
// each it calls late, unless that is nil. A call that got nowhere is Stuck.
func (c *Call[T]) WaitWhile(ctx context.Context, limit time.Duration, steps func() uint64, late func()) (answer T, err error) {
	for before := steps(); ; before = steps() {
		err := c.await(ctx, limit)
		switch {
		case err == nil:
			return c.value, c.err
		case !errors.Is(err, ErrTimeout):
			return answer, err
		case steps() == before:
			return answer, Stuck(limit)
		}
		if late != nil {
			late()
		}
	}
}

// Stuck is the error of a call that got nowhere for that long. It is an ErrTimeout.
func Stuck(limit time.Duration) error {
	return fmt.Errorf("%w for %v: its filesystem hangs", ErrTimeout, limit)
}

func (c *Call[T]) await(ctx context.Context, limit time.Duration) error {
	var expired <-chan time.Time
	if limit > 0 {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case <-c.done:
		return nil
	case <-expired:
		return fmt.Errorf("%w for %v", ErrTimeout, limit)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Abandon leaves the result to late, as Run does. It returns false if the call has returned
// already: then Wait has the result, and late is not called.
func (c *Call[T]) Abandon(late func(T, error)) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.done:
		return false
	default:
	}
	c.abandoned, c.late = true, late
	abandoned.Add(1)
	return true
}

// growStack has a goroutine get the stack that most calls need before it has frames to copy. Growing as they go deeper, it would be
// copied with all of them, several times: that is a tenth of NodeGetVolumeStats in make bench, and a twentieth of NodeGetVolumeHealth.
//
//go:noinline
func growStack() {
	var frame [16 << 10]byte
	fill(&frame)
}

// fill keeps its caller's frame from being optimised away.
//
//go:noinline
func fill(frame *[16 << 10]byte) { frame[0] = 1 }
