package driver

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
)

// errorCodes is the one place where errors become codes, first match first. The
// meanings are those of the CSI specification v1.12, "Error Scheme" and the tables
// of each call. RESOURCE_EXHAUSTED is what makes external-provisioner try another
// node; ABORTED and UNAVAILABLE tell it that the call may still be under way.
var errorCodes = []struct {
	err  error
	code codes.Code
}{
	{pool.ErrInvalid, codes.InvalidArgument},
	{pool.ErrNoSpace, codes.ResourceExhausted},
	{pool.ErrOutOfRange, codes.OutOfRange},
	{pool.ErrExists, codes.AlreadyExists},
	{pool.ErrInUse, codes.FailedPrecondition},
	{pool.ErrBusy, codes.Aborted},
	{pool.ErrUnavailable, codes.Unavailable},
	{pool.ErrDamaged, codes.Internal},
	{pool.ErrNotFound, codes.NotFound},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{context.Canceled, codes.Canceled},
}

// toStatus gives an error its code; one that nobody foresaw is INTERNAL.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	if s, ok := status.FromError(err); ok {
		return s.Err()
	}
	for _, known := range errorCodes {
		if errors.Is(err, known.err) {
			return status.Error(known.code, err.Error())
		}
	}
	return status.Error(codes.Internal, err.Error())
}

// withStatus is toStatus around every handler.
func withStatus(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	response, err := handler(ctx, req)
	if err != nil {
		return nil, toStatus(err)
	}
	return response, nil
}
