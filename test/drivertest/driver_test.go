package drivertest

import (
	"context"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestRepeat(t *testing.T) {
	calls := 0
	answer := func(after int, last codes.Code) func() error {
		calls = 0
		return func() error {
			if calls++; calls <= after {
				return status.Error(codes.Aborted, "another call is in progress")
			}
			return status.Error(last, "")
		}
	}
	for _, last := range []codes.Code{codes.OK, codes.NotFound} {
		if got := status.Code(Repeat(t.Context(), answer(2, last))); got != last || calls != 3 {
			t.Errorf("%v after %d calls, want %v after 3", got, calls, last)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if got := status.Code(Repeat(ended, answer(1<<30, codes.OK))); got != codes.Aborted {
		t.Errorf("a call that is always ABORTED ends with %v", got)
	}
}
