package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// poolErrors are all errors that pkg/volume lets callers test for.
var poolErrors = map[string]struct {
	err  error
	code codes.Code
}{
	"ErrInvalid":       {volume.ErrInvalid, codes.InvalidArgument},
	"ErrNotFound":      {volume.ErrNotFound, codes.NotFound},
	"ErrExists":        {volume.ErrExists, codes.AlreadyExists},
	"ErrInUse":         {volume.ErrInUse, codes.FailedPrecondition},
	"ErrPrecondition":  {volume.ErrPrecondition, codes.FailedPrecondition},
	"ErrNoSpace":       {volume.ErrNoSpace, codes.ResourceExhausted},
	"ErrOtherNode":     {volume.ErrOtherNode, codes.ResourceExhausted},
	"ErrOutOfRange":    {volume.ErrOutOfRange, codes.OutOfRange},
	"ErrCannotGrow":    {volume.ErrCannotGrow, codes.FailedPrecondition},
	"ErrBusy":          {volume.ErrBusy, codes.Aborted},
	"ErrUnavailable":   {volume.ErrUnavailable, codes.Unavailable},
	"ErrPoolMissing":   {volume.ErrPoolMissing, codes.Unavailable},
	"ErrDamagedRecord": {volume.ErrDamagedRecord, codes.Internal},
	"ErrLost":          {volume.ErrLost, codes.Internal},
	"ErrIO":            {volume.ErrIO, codes.Internal},
	"ErrAmbiguous":     {volume.ErrAmbiguous, codes.Internal},
}

func TestPoolErrorsHaveCodes(t *testing.T) {
	for name, c := range poolErrors {
		for how, err := range map[string]error{
			"bare":    c.err,
			"wrapped": fmt.Errorf("create volume v: %w", fmt.Errorf("%w: because", c.err)),
			"joined":  errors.Join(errors.New("first"), c.err),
			"beside":  fmt.Errorf("%w: %w", c.err, syscall.EIO),
		} {
			t.Run(name+" "+how, func(t *testing.T) {
				got := status.Convert(toStatus(err))
				if got.Code() != c.code || got.Message() != err.Error() {
					t.Errorf("the answer is %v %q, want %v %q", got.Code(), got.Message(), c.code, err)
				}
			})
		}
	}
}

// Clients that retry can tell a disk that is slow from one that is away without reading the message.
func TestErrorOfHangingPoolHasItsReason(t *testing.T) {
	for _, as := range []error{volume.ErrUnavailable, volume.ErrNoSpace} {
		details := status.Convert(toStatus(fmt.Errorf("%w: pool: %w", as, hang.Stuck(time.Second)))).Details()
		if len(details) != 1 || fmt.Sprint(details[0]) != fmt.Sprint(wrapperspb.String("PoolHangs")) {
			t.Errorf("%v: the details are %v, want PoolHangs", as, details)
		}
	}
	if details := status.Convert(toStatus(volume.ErrUnavailable)).Details(); len(details) > 0 {
		t.Errorf("the details of another error are %v", details)
	}
}

func TestErrorCodes(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want codes.Code
	}{
		"none":                              {nil, codes.OK},
		"a deadline":                        {context.DeadlineExceeded, codes.DeadlineExceeded},
		"a deadline, wrapped":               {fmt.Errorf("create: %w", context.DeadlineExceeded), codes.DeadlineExceeded},
		"a caller that gave up":             {context.Canceled, codes.Canceled},
		"a caller that gave up, wrapped":    {fmt.Errorf("create: %w", context.Canceled), codes.Canceled},
		"a status of its own":               {status.Error(codes.Aborted, "again"), codes.Aborted},
		"a wrapped status":                  {fmt.Errorf("list: %w", status.Error(codes.Aborted, "again")), codes.Aborted},
		"a disk that fails":                 {&fs.PathError{Op: "open", Path: "/p", Err: syscall.EIO}, codes.Internal},
		"a file that is not there":          {&fs.PathError{Op: "open", Path: "/p", Err: syscall.ENOENT}, codes.Internal},
		"a file that is there":              {fs.ErrExist, codes.Internal},
		"what is not permitted":             {os.ErrPermission, codes.Internal},
		"a full disk":                       {syscall.ENOSPC, codes.Internal},
		"an IO deadline":                    {os.ErrDeadlineExceeded, codes.Internal},
		"an error below the pools":          {bind.ErrBusy, codes.Internal},
		"an error of no known kind":         {errors.New("oops"), codes.Internal},
		"no space, the pool being away":     {fmt.Errorf("%w: %w", volume.ErrNoSpace, volume.ErrUnavailable), codes.ResourceExhausted},
		"damage that keeps from finding":    {fmt.Errorf("%w: %w", volume.ErrDamagedRecord, volume.ErrNotFound), codes.Internal},
		"a pool that is away, one has none": {errors.Join(volume.ErrNotFound, volume.ErrUnavailable), codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			got := status.Convert(toStatus(c.err))
			if got.Code() != c.want {
				t.Errorf("the code is %v, want %v", got.Code(), c.want)
			}
			if c.err != nil && !strings.Contains(c.err.Error(), got.Message()) && got.Message() != c.err.Error() {
				t.Errorf("the message is %q, want %q", got.Message(), c.err)
			}
		})
	}
}

func TestNoAnswerWithError(t *testing.T) {
	for name, want := range map[string]error{"refused": volume.ErrBusy, "answered": nil} {
		t.Run(name, func(t *testing.T) {
			response, err := withStatus(t.Context(), nil, nil, grpc.UnaryHandler(func(context.Context, any) (any, error) { return "answer", want }))
			if (response == "answer") != (want == nil) || (err == nil) != (want == nil) {
				t.Errorf("the answer is %v, %v", response, err)
			}
		})
	}
}

func TestBounded(t *testing.T) {
	long := strings.Repeat("é", 50<<10)
	err := toStatus(fmt.Errorf("%w: the attribute %q has no unit", volume.ErrInvalid, long))
	message := status.Convert(err).Message()
	if len(message) > maxMessage || !strings.HasPrefix(message, "invalid: the attribute") || !strings.HasSuffix(message, "has no unit") || !utf8.ValidString(message) {
		t.Errorf("%d bytes: %q", len(message), message)
	}
	if got := bounded("short", maxName); got != "short" {
		t.Errorf("a short text became %q", got)
	}
}
