package driver

import (
	"context"
	"path"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
)

// tracing makes a span of each call. Names and attributes are those of OpenTelemetry's
// conventions for gRPC, and of CSI, for which there are none, its own.
type tracing struct {
	tracer *trace.Tracer
	pools  *pool.Set
}

func (t *tracing) call(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	name := strings.TrimPrefix(info.FullMethod, "/")
	ctx, span := t.tracer.Call(ctx, name, callerOf(ctx))
	if span == nil {
		return handler(ctx, req)
	}
	volume := volumeOf(req)
	span.Set("rpc.system", "grpc")
	span.Set("rpc.service", path.Dir(name))
	span.Set("rpc.method", path.Base(name))
	span.Set("csi.volume.id", volume)
	// Before the call, which may remove the volume.
	poolName := poolOf(req, t.holder(volume))
	response, err := handler(ctx, req)
	if poolName == "" {
		poolName = poolOf(response, t.holder(volume))
	}
	span.Set("csi.pool", poolName)
	s := status.Convert(err)
	span.SetNumber("rpc.grpc.status_code", int64(s.Code()))
	span.Set("csi.code", s.Code().String())
	if isFault(s.Code()) {
		span.Fail(s.Message())
	}
	span.End()
	return response, err
}

// callerOf is the span that the caller says it makes the call in.
func callerOf(ctx context.Context) trace.Parent {
	parent := metadata.ValueFromIncomingContext(ctx, "traceparent")
	if len(parent) != 1 {
		return trace.Parent{} // none, or no telling which
	}
	return trace.ParseParent(parent[0], strings.Join(metadata.ValueFromIncomingContext(ctx, "tracestate"), ","))
}

// poolOf is the pool that a message names, or otherwise the one that is known.
func poolOf(message any, otherwise string) string {
	switch m := message.(type) {
	case interface{ GetParameters() map[string]string }:
		if name := m.GetParameters()[poolKey]; name != "" {
			return name
		}
	case interface{ GetVolumeContext() map[string]string }:
		if name := m.GetVolumeContext()[poolKey]; name != "" {
			return name
		}
	case *csi.CreateVolumeResponse:
		return m.GetVolume().GetVolumeContext()[poolKey]
	}
	return otherwise
}

// holder is the pool that is known to have a volume.
func (t *tracing) holder(volume string) string {
	id, err := pool.ParseVolumeID(volume)
	if err != nil {
		return ""
	}
	name, _ := t.pools.Holder(id)
	return name.String()
}

// isFault tells the driver's faults from what callers did, as the conventions do for
// servers.
func isFault(code codes.Code) bool {
	switch code {
	case codes.Unknown, codes.DeadlineExceeded, codes.Unimplemented, codes.Internal, codes.Unavailable, codes.DataLoss:
		return true
	}
	return false
}
