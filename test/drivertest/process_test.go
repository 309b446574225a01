package drivertest

import (
	"context"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A disk that is slow, and what goes on because of that, ends no test but those that have it hang.
func TestCallsOnSlowDisk(t *testing.T) {
	hangs := func(code codes.Code) error {
		s, err := status.New(code, "no answer").WithDetails(wrapperspb.String(string(health.PoolHangs)))
		must.Succeed(t, err)
		return s.Err()
	}
	slow, full := hangs(codes.Unavailable), hangs(codes.ResourceExhausted)
	busy := status.Error(codes.Aborted, "another call is in progress")
	other := status.Error(codes.Unavailable, "another pool: its filesystem hangs")
	for name, test := range map[string]struct {
		answers []error
		hanging bool
		want    codes.Code
		calls   int
	}{
		"slow":           {[]error{slow, full, busy, nil}, false, codes.OK, 4},
		"slow, then not": {[]error{slow, other}, false, codes.Unavailable, 2},
		"busy":           {[]error{busy}, false, codes.Aborted, 1},
		"refused":        {[]error{other}, false, codes.Unavailable, 1},
		"hanging":        {[]error{slow}, true, codes.Unavailable, 1},
	} {
		t.Run(name, func(t *testing.T) {
			p, calls := new(Process), 0
			if test.hanging {
				p.Hanging()
			}
			err := p.calling(t.Context(), "", nil, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
				calls++
				return test.answers[calls-1]
			})
			if status.Code(err) != test.want || calls != test.calls {
				t.Errorf("%v after %d calls, want %v after %d", err, calls, test.want, test.calls)
			}
		})
	}
}
