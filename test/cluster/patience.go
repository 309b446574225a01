package cluster

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// Patient is a check of something that may be unable to answer for the moment: kubelet has
// no statistics in its first seconds, the API server waits for its disk, a connection ends
// with the process on its other side.
func Patient(check func(context.Context) (string, error)) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		state, err := check(ctx)
		if apierrors.IsInternalError(err) || apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) ||
			apierrors.IsServiceUnavailable(err) || apierrors.IsTooManyRequests(err) ||
			utilnet.IsConnectionRefused(err) || utilnet.IsConnectionReset(err) || utilnet.IsHTTP2ConnectionLost(err) || utilnet.IsProbableEOF(err) {
			return err.Error(), nil
		}
		return state, err
	}
}
