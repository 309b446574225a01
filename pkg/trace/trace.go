// Package trace records what calls do as spans, and sends them to a collector by OTLP
// over HTTP (opentelemetry.io/docs/specs/otlp, in its binary encoding). It has what this
// driver needs of that and no more: the reasons are in docs/decisions/0018.
//
// Where nothing is traced, Begin costs a look into the context and allocates nothing. No
// call waits for the collector, or fails with it: spans that it does not take in time
// are dropped and counted.
package trace

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"strings"
	"sync/atomic"
	"time"
)

// A Parent is the span of a caller. The zero Parent is none.
type Parent struct {
	trace   [16]byte
	span    [8]byte
	sampled bool
	state   string
}

// maxState is how much of a tracestate is passed on, in bytes (W3C Trace Context, 3.3.1.5).
const maxState = 512

// ParseParent reads the headers traceparent and tracestate of the W3C Trace Context. What
// does not parse is none, as that says.
func ParseParent(traceparent, tracestate string) Parent {
	fields := strings.Split(traceparent, "-")
	// A later version may have more fields.
	if len(fields) < 4 || fields[0] == "ff" || fields[0] == "00" && len(fields) != 4 {
		return Parent{}
	}
	var version, flags [1]byte
	var p Parent
	if !decode(version[:], fields[0]) || !decode(p.trace[:], fields[1]) || !decode(p.span[:], fields[2]) || !decode(flags[:], fields[3]) {
		return Parent{}
	}
	if p.trace == [16]byte{} || p.span == [8]byte{} {
		return Parent{}
	}
	p.sampled = flags[0]&1 != 0
	if len(tracestate) <= maxState {
		p.state = tracestate
	}
	return p
}

// decode takes exactly as many lower-case digits as there is room for.
func decode(to []byte, digits string) bool {
	if len(digits) != 2*len(to) || strings.ToLower(digits) != digits {
		return false
	}
	_, err := hex.Decode(to, []byte(digits))
	return err == nil
}

// A Kind says which end of a call a span is. The numbers are OTLP's.
type Kind int

// The kinds that this driver has.
const (
	Internal Kind = 1
	Server   Kind = 2
)

// A Span is something that takes time. A nil Span is one that is not recorded: all its
// methods do nothing. It belongs to one goroutine at a time.
type Span struct {
	tracer     *Tracer
	parent     Parent
	id         [8]byte
	name       string
	kind       Kind
	begin, end time.Time
	attributes []attribute
	failure    string
	failed     bool
}

// An attribute has a text or a number.
type attribute struct {
	key, text string
	number    int64
	isNumber  bool
}

// spanKey is that of the span in a context.
type spanKey struct{}

// Call begins the span of a call that somebody made. Where the caller says that it does
// not record, nothing is; without a caller a trace of its own begins.
func (t *Tracer) Call(ctx context.Context, name string, parent Parent) (context.Context, *Span) {
	if parent.trace == [16]byte{} {
		_, _ = rand.Read(parent.trace[:]) // it never fails
		parent.sampled = true
	}
	if !parent.sampled {
		return ctx, nil
	}
	s := t.begin(name, Server, parent)
	return context.WithValue(ctx, spanKey{}, s), s
}

// Begin begins a step of the call that ctx is of.
func Begin(ctx context.Context, name string) *Span {
	call, _ := ctx.Value(spanKey{}).(*Span)
	if call == nil {
		return nil
	}
	parent := call.parent
	parent.span = call.id
	return call.tracer.begin(name, Internal, parent)
}

func (t *Tracer) begin(name string, kind Kind, parent Parent) *Span {
	s := &Span{tracer: t, parent: parent, name: name, kind: kind, begin: time.Now()}
	_, _ = rand.Read(s.id[:])
	return s
}

// Set notes a text, unless it is empty.
func (s *Span) Set(key, text string) {
	if s != nil && text != "" {
		s.attributes = append(s.attributes, attribute{key: key, text: text})
	}
}

// SetNumber notes a number.
func (s *Span) SetNumber(key string, number int64) {
	if s != nil {
		s.attributes = append(s.attributes, attribute{key: key, number: number, isNumber: true})
	}
}

// Fail notes that it failed, and why.
func (s *Span) Fail(why string) {
	if s != nil {
		s.failed, s.failure = true, why
	}
}

// End ends it and hands it over, after which it must not be touched. It never waits.
func (s *Span) End() {
	if s == nil {
		return
	}
	s.end = time.Now()
	s.tracer.take(s)
}

// EndWith is End, and Fail if there is an error. It answers that error.
func (s *Span) EndWith(err error) error {
	if err != nil {
		s.Fail(err.Error())
	}
	s.End()
	return err
}

// take queues a span, or drops it if the queue is full or nobody sends any more.
func (t *Tracer) take(s *Span) {
	select {
	case t.queue <- s:
	default:
		t.dropped.Add(1)
	}
	select {
	case <-t.done:
		t.abandon()
	default:
	}
}

// abandon drops what is queued.
func (t *Tracer) abandon() {
	for {
		select {
		case <-t.queue:
			t.dropped.Add(1)
		default:
			return
		}
	}
}

// A Tracer sends spans to a collector. Start makes one.
type Tracer struct {
	config  Config
	queue   chan *Span
	dropped atomic.Uint64
	// ending is closed when what is queued is to be sent at once, and done when all that
	// was.
	ending, done chan struct{}
	cancel       context.CancelFunc
}

// Dropped is how many spans no collector took.
func (t *Tracer) Dropped() uint64 { return t.dropped.Load() }

// Step does something as a step of the call that ctx is of.
func Step(ctx context.Context, name string, do func() error) error {
	s := Begin(ctx, name)
	return s.EndWith(do())
}
