// Package trace records calls and their steps as spans, and exports them to a collector with
// OpenTelemetry's SDK. The variables OTEL_* configure it as they do in other programs.
//
// Where nothing is traced, Begin reads a value of the context and allocates nothing. No call
// waits for the collector or fails with it: spans that it does not take in time are dropped
// and counted.
package trace

import (
	"context"

	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

const scope = "kubevirt.io/hostpath-provisioner"

// A Span is a step of a call that is being recorded, or of one that is not: then its methods
// do nothing.
type Span struct{ span trace.Span }

// Begin begins a step of the call that ctx belongs to.
func Begin(ctx context.Context, name string) Span {
	call := trace.SpanFromContext(ctx)
	if !call.IsRecording() {
		return Span{}
	}
	_, step := call.TracerProvider().Tracer(scope).Start(ctx, name)
	return Span{step}
}

// EndWith ends the step, which failed if err is not nil, and returns err.
func (s Span) EndWith(err error) error {
	if s.span == nil {
		return err
	}
	if err != nil {
		s.span.SetStatus(codes.Error, err.Error())
	}
	s.span.End()
	return err
}

// Step runs do as a step of the call that ctx belongs to.
func Step(ctx context.Context, name string, do func() error) error {
	s := Begin(ctx, name)
	return s.EndWith(do())
}
