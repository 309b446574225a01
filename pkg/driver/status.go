package driver

import (
	"context"
	"errors"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

type errorCode struct {
	err  error
	code codes.Code
}

// errorCodes is the one place where errors become codes, first match first. The
// meanings are those of the CSI specification v1.13, "Error Scheme" and the tables
// of each call. RESOURCE_EXHAUSTED is what makes external-provisioner try another
// node; ABORTED and UNAVAILABLE mean that the call may still be under way.
var errorCodes = []errorCode{
	{volume.ErrInvalid, codes.InvalidArgument},
	// Not OUT_OF_RANGE: kubelet expands at each mount a volume whose claim was enlarged, and
	// mounts it at its old size only after this code.
	{volume.ErrCannotGrow, codes.FailedPrecondition},
	{volume.ErrPrecondition, codes.FailedPrecondition},
	{volume.ErrNoSpace, codes.ResourceExhausted},
	{volume.ErrOtherNode, codes.ResourceExhausted},
	{volume.ErrOutOfRange, codes.OutOfRange},
	{volume.ErrExists, codes.AlreadyExists},
	{volume.ErrInUse, codes.FailedPrecondition},
	{volume.ErrBusy, codes.Aborted},
	{volume.ErrUnavailable, codes.Unavailable},
	{volume.ErrPoolMissing, codes.Unavailable},
	{volume.ErrDamagedRecord, codes.Internal},
	{volume.ErrLost, codes.Internal},
	{volume.ErrIO, codes.Internal},
	{volume.ErrAmbiguous, codes.Internal},
	{volume.ErrNotFound, codes.NotFound},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{context.Canceled, codes.Canceled},
}

// toStatus gives an error its code; one that is not in the table is INTERNAL. That of a pool that hangs has the reason
// health.PoolHangs as a detail.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	if s, ok := status.FromError(err); ok {
		short := s.Proto() // a copy
		short.Message = bounded(short.GetMessage(), maxMessage)
		return status.ErrorProto(short)
	}
	code := codes.Internal
	if i := slices.IndexFunc(errorCodes, func(known errorCode) bool { return errors.Is(err, known.err) }); i >= 0 {
		code = errorCodes[i].code
	}
	s := status.New(code, bounded(err.Error(), maxMessage))
	if !errors.Is(err, hang.ErrTimeout) {
		return s.Err()
	}
	// A program can tell by it that the disk may merely be busy.
	detailed, err := s.WithDetails(wrapperspb.String(string(health.PoolHangs)))
	if err != nil {
		return s.Err()
	}
	return detailed.Err()
}

// What callers write is repeated in errors, events, logs and spans, with each retry: the
// author of a pod can write 100 KB into an attribute. The bounds are bytes.
const (
	maxMessage = 2048
	maxName    = 256 // longer than any volume id
)

// bounded shortens a text in the middle: an error says at its end what was wrong.
func bounded(text string, most int) string {
	if len(text) <= most {
		return text
	}
	const cut = " [...] "
	head := (most - len(cut)) / 2
	tail := most - len(cut) - head
	return strings.ToValidUTF8(text[:head], "") + cut + strings.ToValidUTF8(text[len(text)-tail:], "")
}

// withStatus is toStatus around every handler.
func withStatus(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	response, err := handler(ctx, req)
	if err != nil {
		return nil, toStatus(err)
	}
	return response, nil
}
