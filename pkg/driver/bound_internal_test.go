package driver

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
)

func TestCallTimeout(t *testing.T) {
	for name, c := range map[string]struct {
		limit    time.Duration // of the driver
		deadline time.Duration // of the caller; 0 for none
		want     time.Duration
	}{
		"is two minutes":              {0, 0, 2 * time.Minute},
		"can be configured":           {time.Second, 0, time.Second},
		"is less if the caller wants": {0, 10 * time.Second, 10 * time.Second},
		"is not more for a caller":    {0, time.Hour, 2 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := NewServer(Config{CallLimit: c.limit}, nil, nil, klog.Logger{})
				ctx := t.Context()
				if c.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.deadline)
					defer cancel()
				}
				release := make(chan struct{})
				var handlerErr error // what the handler sees
				start := time.Now()
				_, err := s.bound(ctx, nil, nil, func(ctx context.Context, _ any) (any, error) {
					<-release
					handlerErr = ctx.Err()
					return "late", nil
				})
				if got := time.Since(start); got != c.want || status.Code(err) != codes.DeadlineExceeded {
					t.Errorf("the answer is %v after %v, want DEADLINE_EXCEEDED after %v", err, got, c.want)
				}
				close(release)
				s.calls.Wait()
				if handlerErr != context.DeadlineExceeded {
					t.Errorf("the handler's context ends with %v", handlerErr)
				}
			})
		})
	}
}
