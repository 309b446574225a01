package driver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	oteltrace "go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// tracing adds what is CSI's to the spans that otelgrpc makes of calls.
type tracing struct{ pools *pool.Set }

// traced makes a server record its calls as spans, as children of those that their callers
// name in the headers of OTEL_PROPAGATORS.
func traced(tracer *trace.Tracer) grpc.ServerOption {
	return grpc.StatsHandler(otelgrpc.NewServerHandler(
		otelgrpc.WithTracerProvider(tracer.Provider()),
		otelgrpc.WithPropagators(tracer.Propagators()),
	))
}

func (t *tracing) call(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	span := oteltrace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return handler(ctx, req)
	}
	volume := volumeOf(req)
	// Before the call, which may remove the volume.
	poolName := poolOf(req, t.holder(volume))
	response, err := handler(ctx, req)
	if poolName == "" {
		poolName = poolOf(response, t.holder(volume))
	}
	for key, value := range map[string]string{"csi.volume.id": volume, "csi.pool": poolName} {
		if value != "" {
			span.SetAttributes(attribute.String(key, bounded(value, maxName)))
		}
	}
	return response, err
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
func (t *tracing) holder(volumeID string) string {
	id, err := volume.ParseID(volumeID)
	if err != nil {
		return ""
	}
	name, _ := t.pools.Holder(id)
	return name.String()
}
