package trace_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	otlp "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// clearEnvironment keeps the environment of the tests out of them.
func clearEnvironment(t *testing.T, variables map[string]string) {
	t.Helper()
	for _, name := range []string{
		"OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
		"OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_PROPAGATORS", "OTEL_TRACES_SAMPLER",
	} {
		t.Setenv(name, "")
	}
	for name, value := range variables {
		t.Setenv(name, value)
	}
}

// A collector accepts traces by both protocols.
type collector struct {
	otlp.UnimplementedTraceServiceServer
	http, grpc string // addresses
	requests   chan *otlp.ExportTraceServiceRequest
}

func (c *collector) Export(_ context.Context, r *otlp.ExportTraceServiceRequest) (*otlp.ExportTraceServiceResponse, error) {
	c.requests <- r
	return &otlp.ExportTraceServiceResponse{}, nil
}

func startCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{requests: make(chan *otlp.ExportTraceServiceRequest, 10)}
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var request otlp.ExportTraceServiceRequest
		if body, err := io.ReadAll(r.Body); err != nil || proto.Unmarshal(body, &request) != nil || r.URL.Path != "/v1/traces" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		c.requests <- &request
	}))
	t.Cleanup(web.Close)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	server := grpc.NewServer()
	otlp.RegisterTraceServiceServer(server, c)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		// It may not have begun yet.
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
	})
	c.http, c.grpc = web.URL, "http://"+listener.Addr().String()
	return c
}

var errStep = errors.New("no space left")

// call makes a call with one step that fails.
func call(t *testing.T, tracer *trace.Tracer) {
	t.Helper()
	ctx, span := tracer.Provider().Tracer("test").Start(t.Context(), "call")
	if err := trace.Step(ctx, "step", func() error { return errStep }); !errors.Is(err, errStep) {
		t.Errorf("Step returns %v", err)
	}
	span.End()
}

func TestExport(t *testing.T) {
	c := startCollector(t)
	for _, row := range []struct {
		name      string
		endpoint  string
		variables map[string]string
		service   string
		want      []string
	}{
		{name: "flag", endpoint: c.http},
		{name: "flag with path", endpoint: c.http + "/v1/traces/"},
		{name: "variable", variables: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": c.http}},
		{name: "variable for traces", variables: map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": c.http + "/v1/traces"}},
		{name: "flag overrides variable", endpoint: c.http, variables: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}},
		{name: "gRPC by flag", endpoint: c.grpc, variables: map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}},
		{name: "gRPC by variable", variables: map[string]string{
			"OTEL_EXPORTER_OTLP_ENDPOINT": c.grpc, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
		}},
		{name: "service", endpoint: c.http, variables: map[string]string{"OTEL_SERVICE_NAME": "mine"}, service: "mine"},
	} {
		t.Run(row.name, func(t *testing.T) {
			clearEnvironment(t, row.variables)
			tracer, err := trace.New(trace.Config{Endpoint: row.endpoint, Service: "driver", Version: "v1", Node: "node-a"})
			must.Succeed(t, err)
			must.Succeed(t, tracer.Start(logr.Discard()))
			call(t, tracer)
			must.Succeed(t, tracer.Close(t.Context()))
			resource := (<-c.requests).GetResourceSpans()[0]
			got := make(map[string]string)
			for _, a := range resource.GetResource().GetAttributes() {
				if !strings.HasPrefix(a.GetKey(), "telemetry.sdk.") {
					got[a.GetKey()] = a.GetValue().GetStringValue()
				}
			}
			for _, scope := range resource.GetScopeSpans() {
				for _, s := range scope.GetSpans() {
					got[s.GetName()] = s.GetStatus().GetMessage()
				}
			}
			service := "driver"
			if row.service != "" {
				service = row.service
			}
			want := map[string]string{
				"service.name": service, "service.version": "v1", "service.instance.id": "node-a", "k8s.node.name": "node-a",
				"call": "", "step": "no space left",
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestTracingDisabled(t *testing.T) {
	for name, variables := range map[string]map[string]string{
		"by default":  nil,
		"no exporter": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
		"no SDK":      {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
	} {
		t.Run(name, func(t *testing.T) {
			clearEnvironment(t, variables)
			if tracer, err := trace.New(trace.Config{}); tracer != nil || err != nil {
				t.Errorf("%v, %v; want no tracer", tracer, err)
			}
		})
	}
}

// All that is wrong is reported at once, and no secret with it.
func TestProblems(t *testing.T) {
	clearEnvironment(t, map[string]string{
		"OTEL_EXPORTER_OTLP_HEADERS": "s3cret", "OTEL_EXPORTER_OTLP_CERTIFICATE": "/no/such/file", "OTEL_EXPORTER_OTLP_TIMEOUT": "soon",
		"OTEL_TRACES_SAMPLER": "sometimes", "OTEL_PROPAGATORS": "tracecontext,pigeon", "OTEL_TRACES_EXPORTER": "fax",
	})
	_, err := trace.New(trace.Config{Endpoint: "http://collector:4318"})
	for _, want := range []string{"headers", "/no/such/file", "duration", "sometimes", "pigeon", "fax"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not mention %q", err, want)
		}
	}
	if strings.Contains(fmt.Sprint(err), "s3cret") {
		t.Errorf("%v has the secret", err)
	}
}

func TestEndpointProblems(t *testing.T) {
	for _, endpoint := range []string{"collector:4317", "http://", "http://user:password@collector", "ftp://collector", "http://collector?a=b", "http://%zz"} {
		clearEnvironment(t, nil)
		if _, err := trace.New(trace.Config{Endpoint: endpoint}); err == nil {
			t.Errorf("%q is accepted", endpoint)
		}
	}
	clearEnvironment(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://%zz"})
	if _, err := trace.New(trace.Config{}); err == nil || !strings.Contains(err.Error(), "OTEL_EXPORTER_OTLP_ENDPOINT") {
		t.Errorf("the variable: %v", err)
	}
	clearEnvironment(t, map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"})
	if _, err := trace.New(trace.Config{Endpoint: "http://collector"}); err == nil || !strings.Contains(err.Error(), "smoke") {
		t.Errorf("the protocol: %v", err)
	}
}

// A collector that accepts connections and never answers is the worst: nothing fails.
func TestSilentCollector(t *testing.T) {
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
	}))
	defer server.Close()
	defer close(release)
	const room, calls = 10, 1000
	clearEnvironment(t, map[string]string{"OTEL_BSP_MAX_QUEUE_SIZE": fmt.Sprint(room), "OTEL_BSP_SCHEDULE_DELAY": "1"})
	tracer, err := trace.New(trace.Config{Endpoint: server.URL})
	must.Succeed(t, err)
	var log strings.Builder
	must.Succeed(t, tracer.Start(funcr.New(func(_, line string) { fmt.Fprintln(&log, line) }, funcr.Options{})))
	start := time.Now()
	for range calls {
		call(t, tracer)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("calls waited for the collector: %v", took)
	}
	if dropped := tracer.Dropped(); dropped < 2*calls-2*room-2 {
		t.Errorf("%d of %d spans were dropped: the queue does not end at %d", dropped, 2*calls, room)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := tracer.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Close returns %v", err)
	}
	if dropped := tracer.Dropped(); dropped != 2*calls {
		t.Errorf("%d of %d spans count as dropped", dropped, 2*calls)
	}
	if !strings.Contains(log.String(), "Failed to export spans") {
		t.Errorf("the log has %q", log.String())
	}
}

// Most drivers trace nothing: then a step costs nothing but a lookup in the context.
func TestStepWithoutTracing(t *testing.T) {
	ctx := t.Context()
	if n := testing.AllocsPerRun(100, func() {
		if err := trace.Step(ctx, "step", func() error { return errStep }); !errors.Is(err, errStep) {
			t.Error(err)
		}
	}); n > 0 {
		t.Errorf("a step makes %v allocations, want none", n)
	}
}
