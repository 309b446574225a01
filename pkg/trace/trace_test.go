package trace

import (
	"context"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	resourcepb "go.opentelemetry.io/proto/otlp/resource/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
)

const (
	aTrace  = "4bf92f3577b34da6a3ce929d0e0e4736"
	aSpan   = "00f067aa0ba902b7"
	aParent = "00-" + aTrace + "-" + aSpan + "-01"
)

// The cases of W3C Trace Context, 3.2.2.
func TestParseParent(t *testing.T) {
	for name, c := range map[string]struct {
		header       string
		has, sampled bool
	}{
		"one that records":           {aParent, true, true},
		"one that does not":          {"00-" + aTrace + "-" + aSpan + "-00", true, false},
		"other flags":                {"00-" + aTrace + "-" + aSpan + "-03", true, true},
		"a later version":            {"01-" + aTrace + "-" + aSpan + "-01-more", true, true},
		"nothing":                    {"", false, false},
		"more than version 00 has":   {aParent + "-more", false, false},
		"the version that is none":   {"ff-" + aTrace + "-" + aSpan + "-01", false, false},
		"upper case":                 {"00-" + strings.ToUpper(aTrace) + "-" + aSpan + "-01", false, false},
		"no trace":                   {"00-" + strings.Repeat("0", 32) + "-" + aSpan + "-01", false, false},
		"no span":                    {"00-" + aTrace + "-0000000000000000-01", false, false},
		"a short trace":              {"00-4bf92f-" + aSpan + "-01", false, false},
		"letters that are no digits": {"00-" + strings.Repeat("g", 32) + "-" + aSpan + "-01", false, false},
		"a megabyte of hyphens":      {strings.Repeat("-", 1<<20), false, false},
	} {
		t.Run(name, func(t *testing.T) {
			p := ParseParent(c.header, "")
			if (p != Parent{}) != c.has || p.sampled != c.sampled {
				t.Errorf("%+v", p)
			}
			if c.has && (hex.EncodeToString(p.trace[:]) != aTrace || hex.EncodeToString(p.span[:]) != aSpan) {
				t.Errorf("%+v is of another trace or span", p)
			}
		})
	}
	if p := ParseParent(aParent, "vendor=1"); p.state != "vendor=1" {
		t.Errorf("the state is %q", p.state)
	}
	if p := ParseParent(aParent, strings.Repeat("x", 513)); p.state != "" {
		t.Error("a state that is too long is passed on")
	}
}

func TestParseEndpoint(t *testing.T) {
	for endpoint, want := range map[string]string{
		"http://collector:4318":            "http://collector:4318/v1/traces",
		"http://collector:4318/":           "http://collector:4318/v1/traces",
		"https://collector/otlp":           "https://collector/otlp/v1/traces",
		"https://collector/otlp/v1/traces": "https://collector/otlp/v1/traces",
		"http://[::1]:4318":                "http://[::1]:4318/v1/traces",
		"collector:4318":                   "",
		"grpc://collector:4317":            "",
		"http://":                          "",
		"http://user:secret@collector":     "",
		"http://collector?x=1":             "",
		"http://collector:port":            "",
	} {
		u, err := ParseEndpoint(endpoint)
		if (err == nil) != (want != "") || err == nil && u.String() != want {
			t.Errorf("%s: %v, %v; want %q", endpoint, u, err, want)
		}
	}
}

func TestParseHeaders(t *testing.T) {
	header, err := ParseHeaders("Authorization=Bearer%20abc, x-scope-orgid = 1 ,")
	if err != nil || header.Get("Authorization") != "Bearer abc" || header.Get("X-Scope-Orgid") != "1" {
		t.Errorf("%v, %v", header, err)
	}
	for _, bad := range []string{"secret", "=secret", "a=%zzsecret", "a=secret%0d%0aX: y", "a b=secret"} {
		_, err := ParseHeaders(bad)
		if err == nil {
			t.Errorf("%q is taken", bad)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: the error tells the secret: %v", bad, err)
		}
	}
}

// A collector answers by a function, and keeps what it took.
type collector struct {
	spans  chan *tracepb.ResourceSpans
	header http.Header
}

// ServeHTTP takes a request of OTLP.
func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var data tracepb.TracesData
	if err := errors.Join(err, proto.Unmarshal(body, &data)); err != nil || r.Header.Get("Content-Type") != "application/x-protobuf" {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	c.header = r.Header
	for _, rs := range data.GetResourceSpans() {
		c.spans <- rs
	}
}

func start(t *testing.T, handler http.Handler) (*Tracer, *httptest.Server) {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	u, err := ParseEndpoint(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	return Start(Config{URL: u, Service: "driver", Version: "v1", Node: "node-a", Header: http.Header{"X-Key": {"k"}}, Log: logr.Discard()}), server
}

func text(key, value string) *commonpb.KeyValue {
	return &commonpb.KeyValue{Key: key, Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_StringValue{StringValue: value}}}
}

func TestSpansReachACollector(t *testing.T) {
	c := &collector{spans: make(chan *tracepb.ResourceSpans, 1)}
	tracer, _ := start(t, c)
	ctx, call := tracer.Call(t.Context(), "csi.v1.Node/NodePublishVolume", ParseParent(aParent, "vendor=1"))
	call.Set("pool", "local")
	call.Set("empty", "")
	call.SetNumber("code", -13)
	step := Begin(ctx, "mount")
	if err := step.EndWith(errors.New("broken")); err == nil {
		t.Error("the error is lost")
	}
	call.End()
	if err := tracer.Close(t.Context()); err != nil {
		t.Error(err)
	}
	trace, span := unhex(t, aTrace), unhex(t, aSpan)
	want := &tracepb.ResourceSpans{
		Resource: &resourcepb.Resource{Attributes: []*commonpb.KeyValue{
			text("service.name", "driver"), text("service.version", "v1"), text("service.instance.id", "node-a"), text("k8s.node.name", "node-a"),
		}},
		ScopeSpans: []*tracepb.ScopeSpans{{
			Scope: &commonpb.InstrumentationScope{Name: "driver", Version: "v1"},
			Spans: []*tracepb.Span{
				{
					TraceId: trace, ParentSpanId: call.id[:], SpanId: step.id[:], TraceState: "vendor=1", Flags: 0x101,
					Name: "mount", Kind: tracepb.Span_SPAN_KIND_INTERNAL,
					Status: &tracepb.Status{Code: tracepb.Status_STATUS_CODE_ERROR, Message: "broken"},
				},
				{
					TraceId: trace, ParentSpanId: span, SpanId: call.id[:], TraceState: "vendor=1", Flags: 0x301,
					Name: "csi.v1.Node/NodePublishVolume", Kind: tracepb.Span_SPAN_KIND_SERVER,
					Attributes: []*commonpb.KeyValue{text("pool", "local"), {Key: "code", Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_IntValue{IntValue: -13}}}},
				},
			},
		}},
	}
	got := <-c.spans
	for _, s := range got.GetScopeSpans()[0].GetSpans() {
		if s.GetStartTimeUnixNano() == 0 || s.GetEndTimeUnixNano() < s.GetStartTimeUnixNano() {
			t.Errorf("the span %s lasts from %d to %d", s.GetName(), s.GetStartTimeUnixNano(), s.GetEndTimeUnixNano())
		}
		s.StartTimeUnixNano, s.EndTimeUnixNano = 0, 0
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("the collector got something else (-want +got):\n%s", diff)
	}
	if c.header.Get("X-Key") != "k" || c.header.Get("User-Agent") != "driver/v1" {
		t.Errorf("the header is %v", c.header)
	}
}

func unhex(t *testing.T, digits string) []byte {
	t.Helper()
	b, err := hex.DecodeString(digits)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestACallWithoutACallerBeginsATrace(t *testing.T) {
	tracer := &Tracer{queue: make(chan *Span, 1)}
	_, one := tracer.Call(t.Context(), "a", Parent{})
	_, two := tracer.Call(t.Context(), "a", Parent{})
	if one.parent.trace == two.parent.trace || one.parent.trace == [16]byte{} || one.id == two.id || (one.parent.span != [8]byte{}) {
		t.Errorf("the spans %+v and %+v are not of traces of their own", one, two)
	}
}

func TestWhatTheCallerDoesNotRecordIsNotRecorded(t *testing.T) {
	tracer := &Tracer{queue: make(chan *Span, 1)}
	ctx, span := tracer.Call(t.Context(), "a", ParseParent(strings.TrimSuffix(aParent, "01")+"00", ""))
	if span != nil || Begin(ctx, "b") != nil {
		t.Error("it is recorded")
	}
	span.Set("a", "b")
	span.SetNumber("a", 1)
	span.Fail("why")
	span.End()
}

// What is off costs nothing that a garbage collector would have to collect.
func TestNothingIsAllocatedWhereNothingIsTraced(t *testing.T) {
	ctx := context.WithValue(t.Context(), struct{ other int }{}, 1)
	failure := errors.New("broken")
	if n := testing.AllocsPerRun(1000, func() {
		s := Begin(ctx, "mount")
		s.Set("volume", "pvc-1")
		s.SetNumber("code", 1)
		_ = s.EndWith(failure)
		_ = Step(ctx, "unmount", func() error { return failure })
	}); n != 0 {
		t.Errorf("%v allocations for each call, want none", n)
	}
}

func TestAFullQueueDropsAndCounts(t *testing.T) {
	tracer := &Tracer{queue: make(chan *Span, 2), config: Config{URL: &url.URL{Scheme: "http", Host: "collector"}}}
	for range 5 {
		_, s := tracer.Call(t.Context(), "a", Parent{})
		s.End()
	}
	if got := tracer.Dropped(); got != 3 {
		t.Errorf("%d spans are dropped, want 3", got)
	}
}

// refuse answers a number of times with a code, and then takes everything.
type refuse struct {
	times atomic.Int64
	code  int
	asked atomic.Int64
	collector
}

func (r *refuse) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.asked.Add(1)
	if r.times.Add(-1) >= 0 {
		w.WriteHeader(r.code)
		return
	}
	r.collector.ServeHTTP(w, req)
}

// The transport is called directly: no network in a bubble of time.
func (r *refuse) RoundTrip(req *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	r.ServeHTTP(w, req)
	return w.Result(), nil
}

func TestDeliveryIsTriedAgainWhereThatMayHelp(t *testing.T) {
	for name, c := range map[string]struct {
		code         int
		times, asked int64
		delivered    bool
	}{
		"an overloaded collector":             {http.StatusTooManyRequests, 2, 3, true},
		"one that is started":                 {http.StatusServiceUnavailable, 3, 4, true},
		"one that is gone for good":           {http.StatusBadGateway, 100, 4, false},
		"one that does not want such a thing": {http.StatusBadRequest, 100, 1, false},
		"one that has no such path":           {http.StatusNotFound, 100, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &refuse{code: c.code, collector: collector{spans: make(chan *tracepb.ResourceSpans, 1)}}
				r.times.Store(c.times)
				tracer := &Tracer{config: Config{URL: &url.URL{Scheme: "http", Host: "collector"}}, ending: make(chan struct{})}
				_, span := tracer.Call(t.Context(), "a", Parent{})
				span.end = time.Now()
				err := tracer.deliver(t.Context(), &http.Client{Transport: r}, []*Span{span})
				if (err == nil) != c.delivered || r.asked.Load() != c.asked {
					t.Errorf("%v after %d requests, want %d", err, r.asked.Load(), c.asked)
				}
			})
		})
	}
}

// hang never answers, until release.
type hang struct{ release, asked chan struct{} }

func (h hang) ServeHTTP(http.ResponseWriter, *http.Request) {
	select {
	case h.asked <- struct{}{}:
	default:
	}
	<-h.release
}

func TestCloseDoesNotWaitForACollectorThatHangs(t *testing.T) {
	h := hang{release: make(chan struct{}), asked: make(chan struct{}, 1)}
	tracer, _ := start(t, h)
	t.Cleanup(func() { close(h.release) }) // before the server is closed
	for range maxBatch + 10 {
		_, s := tracer.Call(t.Context(), "a", Parent{})
		s.End()
	}
	<-h.asked // a full batch is under way
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	begun := time.Now()
	err := tracer.Close(ctx)
	if err == nil || !strings.Contains(err.Error(), "spans did not reach the collector") {
		t.Errorf("%v, want it to tell of the spans", err)
	}
	if took := time.Since(begun); took > requestLimit/2 {
		t.Errorf("closing took %v", took)
	}
	if got := tracer.Dropped(); got != maxBatch+10 {
		t.Errorf("%d spans are dropped, want all %d", got, maxBatch+10)
	}
}

func TestSpansAreSentWithoutAnEnd(t *testing.T) {
	c := &collector{spans: make(chan *tracepb.ResourceSpans, 1)}
	tracer, _ := start(t, c)
	for range maxBatch {
		_, s := tracer.Call(t.Context(), "a", Parent{})
		s.End()
	}
	if got := <-c.spans; len(got.GetScopeSpans()[0].GetSpans()) != maxBatch {
		t.Errorf("%d spans come first, want %d", len(got.GetScopeSpans()[0].GetSpans()), maxBatch)
	}
	if err := tracer.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// Names of files are any bytes, and errors have them. A collector refuses the whole batch
// of a text that is not UTF-8, as protobuf's parsers do.
func TestTextsAreUTF8(t *testing.T) {
	c := &collector{spans: make(chan *tracepb.ResourceSpans, 1)}
	tracer, _ := start(t, c)
	_, s := tracer.Call(t.Context(), "a", Parent{})
	s.Set("path", "b\xffd")
	s.Fail("open b\xff\xfed")
	s.End()
	if err := tracer.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := (<-c.spans).GetScopeSpans()[0].GetSpans()[0]
	if path := got.GetAttributes()[0].GetValue().GetStringValue(); path != "b\ufffdd" {
		t.Errorf("the path is %q", path)
	}
	if why := got.GetStatus().GetMessage(); why != "open b\ufffdd" {
		t.Errorf("the message is %q", why)
	}
}

// A redirect turns a POST into a GET without spans, and its end may be another host's.
func TestARedirectIsNoDelivery(t *testing.T) {
	var followed atomic.Bool
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { followed.Store(true) }))
	t.Cleanup(other.Close)
	for _, code := range []int{http.StatusMovedPermanently, http.StatusFound, http.StatusPermanentRedirect} {
		tracer, _ := start(t, http.RedirectHandler(other.URL, code))
		_, s := tracer.Call(t.Context(), "a", Parent{})
		s.End()
		if err := tracer.Close(t.Context()); err == nil || tracer.Dropped() != 1 {
			t.Errorf("%d: closing gives %v and %d spans are dropped, want 1", code, err, tracer.Dropped())
		}
		if followed.Load() {
			t.Errorf("%d is followed", code)
		}
	}
}

func TestWhatACollectorRejectsIsCounted(t *testing.T) {
	for name, c := range map[string]struct {
		answer  []byte
		dropped uint64
		says    string
	}{
		"nothing":                   {nil, 0, ""},
		"an empty success":          {partialSuccess(0, ""), 0, ""},
		"a warning":                 {partialSuccess(0, "old version"), 0, ""},
		"two of three":              {partialSuccess(2, "too long"), 2, "too long"},
		"more than there were":      {partialSuccess(1<<40, ""), 3, "rejects"},
		"less than none":            {partialSuccess(1<<63, ""), 0, ""},
		"something that was cut":    {partialSuccess(2, "too long")[:3], 0, ""},
		"something that is no OTLP": {[]byte("{}"), 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			tracer, _ := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_, _ = w.Write(c.answer)
			}))
			var logged strings.Builder
			tracer.config.Log = funcr.New(func(_, args string) { logged.WriteString(args) }, funcr.Options{})
			for range 3 {
				_, s := tracer.Call(t.Context(), "a", Parent{})
				s.End()
			}
			err := tracer.Close(t.Context())
			if (err == nil) != (c.dropped == 0) || tracer.Dropped() != c.dropped {
				t.Errorf("closing gives %v and %d spans are dropped, want %d", err, tracer.Dropped(), c.dropped)
			}
			if !strings.Contains(logged.String(), c.says) || c.says == "" && logged.Len() > 0 {
				t.Errorf("the log is %q, want it to say %q", logged.String(), c.says)
			}
		})
	}
}

// partialSuccess is an ExportTraceServiceResponse that rejects spans.
func partialSuccess(rejected uint64, why string) []byte {
	success := message(nil).varint(1, rejected).text(2, why)
	return message(nil).bytes(1, success)
}

func TestSpansThatEndAfterTheTracerAreDropped(t *testing.T) {
	tracer, _ := start(t, &collector{spans: make(chan *tracepb.ResourceSpans, 1)})
	_, s := tracer.Call(t.Context(), "a", Parent{})
	if err := tracer.Close(t.Context()); err != nil {
		t.Error(err)
	}
	s.End()
	if got := tracer.Dropped(); got != 1 {
		t.Errorf("%d spans are dropped, want 1", got)
	}
}

func TestReadCertificates(t *testing.T) {
	if _, err := ReadCertificates("/no/such/file"); err == nil {
		t.Error("a file that is missing is no error")
	}
	if _, err := ReadCertificates("trace_test.go"); err == nil {
		t.Error("a file without certificates is no error")
	}
}
