package hang_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
)

var errMine = errors.New("mine")

func after(d time.Duration) func() (int, error) {
	return func() (int, error) {
		time.Sleep(d)
		return 7, errMine
	}
}

func TestRun(t *testing.T) {
	errEnd := errors.New("the caller ends")
	for _, c := range []struct {
		name           string
		takes, limit   time.Duration
		callerEndsWith error
		want           error
		waited         time.Duration
	}{
		{name: "answer in time", takes: time.Second, limit: time.Minute, want: errMine, waited: time.Second},
		{name: "no limit", takes: time.Hour, want: errMine, waited: time.Hour},
		{name: "limit", takes: time.Hour, limit: time.Minute, want: hang.ErrTimeout, waited: time.Minute},
		{name: "context ends", takes: time.Hour, limit: time.Minute, callerEndsWith: errEnd, want: errEnd, waited: time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				if c.callerEndsWith != nil {
					time.AfterFunc(time.Second, func() { cancel(c.callerEndsWith) })
				}
				late := 0
				start := time.Now()
				value, err := hang.Run(ctx, c.limit, after(c.takes), func(value int, err error) {
					if late = value; !errors.Is(err, errMine) {
						t.Errorf("the late result has the error %v", err)
					}
				})
				if !errors.Is(err, c.want) || time.Since(start) != c.waited {
					t.Errorf("%v after %v, want %v after %v", err, time.Since(start), c.want, c.waited)
				}
				inTime := errors.Is(c.want, errMine)
				if inTime != (value == 7) || inTime != (hang.Abandoned() == 0) {
					t.Errorf("the result is %d, with %d calls abandoned", value, hang.Abandoned())
				}
				time.Sleep(c.takes)
				synctest.Wait()
				if inTime != (late == 0) || hang.Abandoned() != 0 {
					t.Errorf("after its end: late result %d, %d calls abandoned", late, hang.Abandoned())
				}
			})
		})
	}
}

// The goroutine and the caller may be done at the same moment: one of them has the result.
func TestRunHandsResultOutOnce(t *testing.T) {
	for range 1000 {
		late := make(chan int, 1)
		value, err := hang.Run(t.Context(), time.Nanosecond, func() (int, error) { return 7, nil },
			func(value int, _ error) { late <- value })
		if errors.Is(err, hang.ErrTimeout) {
			value = <-late
		}
		if value != 7 {
			t.Fatalf("neither has the result: %v", err)
		}
		if len(late) > 0 {
			t.Fatal("both have the result")
		}
	}
}

func TestWaitAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := hang.Start(after(3 * time.Second))
		if _, err := c.Wait(t.Context(), 2*time.Second); !errors.Is(err, hang.ErrTimeout) {
			t.Errorf("at first: %v", err)
		}
		if value, err := c.Wait(t.Context(), 2*time.Second); value != 7 || !errors.Is(err, errMine) {
			t.Errorf("then: %d, %v", value, err)
		}
	})
}

func TestWaitWhile(t *testing.T) {
	for name, c := range map[string]struct {
		takes, last time.Duration // of the call, and of its steps
		want        error
		late        int
	}{
		"in time":             {takes: 10 * time.Second, want: errMine},
		"slow, but gets on":   {takes: 270 * time.Second, last: 270 * time.Second, want: errMine, late: 4},
		"got nowhere at last": {takes: time.Hour, last: 140 * time.Second, want: hang.ErrTimeout, late: 3},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var steps atomic.Uint64
				begin := time.Now()
				go func() {
					for time.Sleep(10 * time.Second); time.Since(begin) < c.last; time.Sleep(30 * time.Second) {
						steps.Add(1)
					}
				}()
				call, late := hang.Start(after(c.takes)), 0
				_, err := call.WaitWhile(t.Context(), time.Minute, steps.Load, func() { late++ })
				if !errors.Is(err, c.want) || late != c.late {
					t.Errorf("answered %v, late %d times; want %v, %d times", err, late, c.want, c.late)
				}
				time.Sleep(c.takes) // the bubble's time: the call returns
			})
		})
	}
}
