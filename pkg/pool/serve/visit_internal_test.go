package serve

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A caller that does not wait until a filesystem counts as one that hangs gets the answer in its time, and the
// next one asks the disk again.
func TestInTime_callersDeadline(t *testing.T) {
	for name, c := range map[string]struct {
		caller, answered time.Duration // a caller without a deadline has 0
		want             error
		forAll           bool
	}{
		"no deadline":                            {0, 5 * time.Second, hang.ErrTimeout, true},
		"kubelet's":                              {2 * time.Minute, 5 * time.Second, hang.ErrTimeout, true},
		"as long as the limit":                   {5 * time.Second, 4500 * time.Millisecond, hang.ErrTimeout, false},
		"shorter":                                {time.Second, 900 * time.Millisecond, hang.ErrTimeout, false},
		"shorter than what a busy disk may take": {time.Second - 1, time.Second - 1, context.DeadlineExceeded, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if c.caller > 0 {
					var cancel func()
					ctx, cancel = context.WithTimeout(ctx, c.caller)
					defer cancel()
				}
				p, st := &Pool{Options: Options{HangAfter: 5 * time.Second}}, &state{}
				start := time.Now()
				_, err := inTime(ctx, p, st, func() (int, error) { time.Sleep(time.Hour); return 0, nil }, nil)
				if !errors.Is(err, c.want) || time.Since(start) != c.answered {
					t.Errorf("%v after %v, want %v after %v", err, time.Since(start), c.want, c.answered)
				}
				if hung := errors.Is(c.want, hang.ErrTimeout); errors.Is(err, volume.ErrUnavailable) != hung {
					t.Errorf("%v, want an error of the pool: %v", err, hung)
				}
				if forAll := p.hung.Load() == st; forAll != c.forAll {
					t.Errorf("the pool hangs for all callers: %v, want %v", forAll, c.forAll)
				}
				time.Sleep(time.Hour) // the bubble's time: the call returns
			})
		})
	}
}
