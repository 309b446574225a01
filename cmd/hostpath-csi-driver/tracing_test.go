package main

import (
	"cmp"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"syscall"
	"testing"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// collector receives traces over OTLP/HTTP and passes the spans on.
func collector(t *testing.T) (address string, spans <-chan *tracepb.Span) {
	t.Helper()
	taken := make(chan *tracepb.Span, 1000)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var data tracepb.TracesData
		if err != nil || proto.Unmarshal(body, &data) != nil || r.URL.Path != "/v1/traces" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		for _, rs := range data.GetResourceSpans() {
			for _, ss := range rs.GetScopeSpans() {
				for _, span := range ss.GetSpans() {
					taken <- span
				}
			}
		}
	}))
	t.Cleanup(server.Close)
	return server.URL, taken
}

func attribute(s *tracepb.Span, key string) string {
	for _, a := range s.GetAttributes() {
		if a.GetKey() == key {
			return a.GetValue().GetStringValue()
		}
	}
	return ""
}

func testTraces(t *testing.T, program string) {
	address, spans := collector(t)
	d := start(t, program, "--tracing-endpoint="+address, drivertest.ServeMetrics)
	const trace, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+trace+"-"+caller+"-01")
	_, err := d.Create(ctx, vol)
	must.Succeed(t, err)
	must.Succeed(t, d.Publish(ctx, vol, "pod"))
	if err := d.Delete(ctx, vol.ID); err == nil {
		t.Error("a published volume was deleted")
	}
	must.Succeed(t, d.Unpublish(ctx, vol.ID, "pod"))
	scraped, err := d.Metrics(t.Context())
	must.Succeed(t, err)
	if !strings.Contains(scraped, "hostpath_tracing_dropped_spans_total 0\n") {
		t.Error("metrics lack the dropped spans")
	}
	// The remaining spans are exported at exit.
	must.Succeed(t, d.Process.Stop())

	var calls []*tracepb.Span
	steps := make(map[string][]string) // by parent span
	for len(spans) > 0 {
		s := <-spans
		switch {
		case hex.EncodeToString(s.GetTraceId()) != trace: // Probe
		case s.GetKind() == tracepb.Span_SPAN_KIND_SERVER:
			calls = append(calls, s)
		default:
			steps[string(s.GetParentSpanId())] = append(steps[string(s.GetParentSpanId())], s.GetName())
		}
	}
	wantCalls := []struct {
		name, code string
		steps      []string
	}{
		{"csi.v1.Controller/CreateVolume", "OK", []string{"make the directory and its limit", "write the record", "move into the pool"}},
		{"csi.v1.Node/NodePublishVolume", "OK", []string{"mount"}},
		{"csi.v1.Controller/DeleteVolume", "FAILED_PRECONDITION", nil},
		{"csi.v1.Node/NodeUnpublishVolume", "OK", []string{"unmount"}},
	}
	// One can be answered, and its span end after that of the next call.
	slices.SortFunc(calls, func(a, b *tracepb.Span) int { return cmp.Compare(a.GetStartTimeUnixNano(), b.GetStartTimeUnixNano()) })
	if len(calls) != len(wantCalls) {
		t.Fatalf("%d traced calls, want %d: %v", len(calls), len(wantCalls), calls)
	}
	for i, want := range wantCalls {
		s := calls[i]
		if s.GetName() != want.name || hex.EncodeToString(s.GetParentSpanId()) != caller || attribute(s, "rpc.response.status_code") != want.code ||
			attribute(s, "csi.volume.id") != "vol" || attribute(s, "csi.pool") != "local" || s.GetStatus().GetCode() != tracepb.Status_STATUS_CODE_UNSET {
			t.Errorf("span is %v, want %s with %s", s, want.name, want.code)
		}
		if got := steps[string(s.GetSpanId())]; !slices.Equal(got, want.steps) {
			t.Errorf("steps of %s: %q, want %q", want.name, got, want.steps)
		}
	}
}

// An unreachable collector neither fails calls nor delays the exit.
func testNoCollector(t *testing.T, program string) {
	d := start(t, program, "--tracing-endpoint=http://127.0.0.1:1")
	create(d)
	must.Succeed(t, d.Process.Signal(syscall.SIGTERM), d.Process.Wait(inTime))
	if log := d.Process.Log(); !strings.Contains(log, "Failed to export all spans") {
		t.Errorf("the log does not report dropped spans:\n%s", log)
	}
}

func TestParseTracing(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/such/file")
	_, err := parseQuietly(t, "--nodeid=node-a", "--version=v1", `--datadir=[{"name":"a","path":"/a"}]`, "--tracing-endpoint=collector")
	wantWords(t, err, "--tracing-endpoint", `"collector"`, "/no/such/file")
	// Without an endpoint, tracing is off.
	c, err := parseQuietly(t, "--nodeid=node-a", "--version=v1", `--datadir=[{"name":"a","path":"/a"}]`)
	if err != nil || c.tracing != nil {
		t.Errorf("%+v, %v", c.tracing, err)
	}
}
