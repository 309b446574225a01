package trace

import (
	"context"
	"os"
	"strconv"
	"sync/atomic"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	sdk "go.opentelemetry.io/otel/sdk/trace"
)

// An exporter counts the spans that do not arrive, and logs when that begins and when it is
// over, where the SDK would log each batch.
type exporter struct {
	to      *otlptrace.Exporter
	log     logr.Logger
	waiting atomic.Int64 // in the queue, or in a batch that is not being exported yet
	dropped atomic.Uint64
	failing bool // belongs to ExportSpans, which is called by one goroutine

	ctx    context.Context // ends all exports
	cancel context.CancelFunc
	done   chan struct{} // closed by Shutdown, after the last export
}

func newExporter(to *otlptrace.Exporter) *exporter {
	e := &exporter{to: to, done: make(chan struct{})}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	return e
}

func (e *exporter) start() error { return e.to.Start(e.ctx) }

// ExportSpans implements sdk.SpanExporter.
func (e *exporter) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	e.waiting.Add(-int64(len(spans)))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	err := e.to.ExportSpans(ctx, spans)
	switch {
	case err != nil:
		e.dropped.Add(uint64(len(spans)))
		if !e.failing {
			e.log.Error(err, "Failed to export spans; dropping them until the collector accepts them")
		}
	case e.failing:
		e.log.Info("The collector accepts spans again", "dropped", e.dropped.Load())
	}
	e.failing = err != nil
	return nil
}

// Shutdown implements sdk.SpanExporter.
func (e *exporter) Shutdown(ctx context.Context) error {
	defer close(e.done)
	return e.to.Shutdown(ctx)
}

// A processor counts the spans that the SDK's queue has no room for: the SDK does not say.
type processor struct {
	sdk.SpanProcessor
	exporter *exporter
	room     int64
}

// newProcessor makes the queue as long as OTEL_BSP_MAX_QUEUE_SIZE, in spans. The SDK reads
// the other variables OTEL_BSP_*.
func newProcessor(e *exporter) *processor {
	room, err := strconv.Atoi(os.Getenv("OTEL_BSP_MAX_QUEUE_SIZE"))
	if err != nil || room <= 0 {
		room = sdk.DefaultMaxQueueSize
	}
	return &processor{sdk.NewBatchSpanProcessor(e, sdk.WithMaxQueueSize(room)), e, int64(room)}
}

// OnEnd implements sdk.SpanProcessor.
func (p *processor) OnEnd(s sdk.ReadOnlySpan) {
	if !s.SpanContext().IsSampled() {
		return
	}
	if p.exporter.waiting.Add(1) > p.room {
		p.exporter.waiting.Add(-1)
		p.exporter.dropped.Add(1)
		return
	}
	p.SpanProcessor.OnEnd(s)
}
