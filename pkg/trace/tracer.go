package trace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Config is what the program knows of its spans.
type Config struct {
	// Endpoint is the collector's, such as http://collector:4318: OTEL_EXPORTER_OTLP_ENDPOINT
	// on the command line. It may be empty.
	Endpoint string
	// Service is the name of the program, Version its version, and Node where it runs.
	Service, Version, Node string
}

// tracesPath is where collectors take traces (OTLP/HTTP, "Default URL paths").
const tracesPath = "v1/traces"

// A Tracer exports spans. New makes one.
type Tracer struct {
	provider    *sdk.TracerProvider
	propagators propagation.TextMapPropagator
	exporter    *exporter
	processor   *processor
}

// New reads the configuration and the variables OTEL_*, and reports all that is wrong with
// them. It returns nil if nothing is to be traced: neither an endpoint is given nor one of
// OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or the variables switch
// tracing off. No connection is made before Start.
//
// OpenTelemetry's packages report what is wrong with a variable to the logger and the error
// handler of the process, which New sets for a moment.
func New(config Config) (*Tracer, error) {
	if disabled() || config.Endpoint == "" && variable("ENDPOINT") == "" {
		return nil, nil
	}
	var problems problems
	otel.SetLogger(problems.logger())
	otel.SetErrorHandler(&problems)
	defer otel.SetLogger(logr.Discard())
	defer otel.SetErrorHandler(otel.ErrorHandlerFunc(func(error) {}))

	t := &Tracer{propagators: propagators(&problems)}
	client := newClient(config.Endpoint, &problems)
	described, err := resource.New(context.Background(),
		resource.WithAttributes(
			attribute.String("service.name", config.Service),
			attribute.String("service.version", config.Version),
			attribute.String("service.instance.id", config.Node),
			attribute.String("k8s.node.name", config.Node),
		),
		resource.WithTelemetrySDK(),
		resource.WithFromEnv(), // OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME override the rest
	)
	if err != nil {
		problems.Handle(err)
	}
	t.provider = sdk.NewTracerProvider(sdk.WithResource(described)) // with the sampler of OTEL_TRACES_SAMPLER
	if err := problems.err(); err != nil {
		return nil, err
	}
	t.exporter = newExporter(otlptrace.NewUnstarted(client))
	return t, nil
}

func disabled() bool {
	off, _ := strconv.ParseBool(os.Getenv("OTEL_SDK_DISABLED"))
	return off || os.Getenv("OTEL_TRACES_EXPORTER") == "none"
}

// variable is the value of one of the exporter's variables, for traces or otherwise for all
// signals.
func variable(name string) string {
	return cmp.Or(strings.TrimSpace(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_"+name)), strings.TrimSpace(os.Getenv("OTEL_EXPORTER_OTLP_"+name)))
}

// newClient takes the protocol that the variables name. The exporters read all others
// themselves.
func newClient(endpoint string, problems *problems) otlptrace.Client {
	if e := os.Getenv("OTEL_TRACES_EXPORTER"); e != "" && e != "otlp" {
		problems.Handle(fmt.Errorf("OTEL_TRACES_EXPORTER is %q; choose otlp or none", e))
	}
	var http []otlptracehttp.Option
	var grpc []otlptracegrpc.Option
	if endpoint != "" {
		u, err := parseEndpoint(endpoint)
		if err != nil {
			problems.Handle(err)
		}
		http = append(http, otlptracehttp.WithEndpointURL(u))
		grpc = append(grpc, otlptracegrpc.WithEndpointURL(u))
	} else if _, err := url.ParseRequestURI(variable("ENDPOINT")); err != nil {
		problems.Handle(fmt.Errorf("OTEL_EXPORTER_OTLP_ENDPOINT: %w", err))
	}
	switch protocol := variable("PROTOCOL"); protocol {
	case "grpc":
		return otlptracegrpc.NewClient(grpc...)
	case "", "http/protobuf", "http/json":
		return otlptracehttp.NewClient(http...)
	default:
		problems.Handle(fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL is %q; choose grpc, http/protobuf or http/json", protocol))
		return nil
	}
}

// parseEndpoint adds the path for traces, unless that is there.
func parseEndpoint(endpoint string) (string, error) {
	u, err := url.Parse(endpoint)
	if err != nil {
		return "", err
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		return "", fmt.Errorf("%q is not the address of a collector such as http://collector:4318", endpoint)
	}
	u.Path = strings.TrimSuffix(u.Path, "/")
	if !strings.HasSuffix(u.Path, "/"+tracesPath) {
		u = u.JoinPath(tracesPath)
	}
	return u.String(), nil
}

// propagators are the headers by which callers name their spans, by OTEL_PROPAGATORS.
func propagators(problems *problems) propagation.TextMapPropagator {
	names := cmp.Or(os.Getenv("OTEL_PROPAGATORS"), "tracecontext,baggage")
	var all []propagation.TextMapPropagator
	for name := range strings.SplitSeq(names, ",") {
		switch name = strings.TrimSpace(name); name {
		case "tracecontext":
			all = append(all, propagation.TraceContext{})
		case "baggage":
			all = append(all, propagation.Baggage{})
		case "none":
		default:
			problems.Handle(fmt.Errorf("OTEL_PROPAGATORS has %q; choose of tracecontext, baggage and none", name))
		}
	}
	return propagation.NewCompositeTextMapPropagator(all...)
}

// Provider is for instrumentation.
func (t *Tracer) Provider() trace.TracerProvider { return t.provider }

// Propagators is for instrumentation.
func (t *Tracer) Propagators() propagation.TextMapPropagator { return t.propagators }

// Start begins to export spans. Close has to be called after it.
func (t *Tracer) Start(log logr.Logger) error {
	t.exporter.log = log
	if err := t.exporter.start(); err != nil {
		return fmt.Errorf("export spans: %w", err)
	}
	t.processor = newProcessor(t.exporter)
	t.provider.RegisterSpanProcessor(t.processor)
	return nil
}

// Close exports the spans that wait, but takes no longer than ctx. Spans that end later are
// dropped.
func (t *Tracer) Close(ctx context.Context) error {
	err := t.provider.Shutdown(ctx)
	t.exporter.cancel()
	<-t.exporter.done
	if dropped := t.Dropped(); dropped > 0 {
		err = errors.Join(err, fmt.Errorf("spans that were dropped: %d", dropped))
	}
	return err
}

// Dropped is how many spans did not reach the collector: those that ended while the queue
// was full, and those of batches that it did not accept completely.
func (t *Tracer) Dropped() uint64 { return t.exporter.dropped.Load() }

type problems struct {
	mu  sync.Mutex
	all []error
}

// Handle implements otel.ErrorHandler.
func (p *problems) Handle(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = append(p.all, err)
}

// logger collects what is logged as an error. The log's values are left out: they may be
// secrets of OTEL_EXPORTER_OTLP_HEADERS.
func (p *problems) logger() logr.Logger {
	return logr.New(sink{funcr.New(func(string, string) {}, funcr.Options{}).GetSink(), p})
}

type sink struct {
	logr.LogSink
	problems *problems
}

// Error implements logr.LogSink.
func (s sink) Error(err error, message string, about ...any) {
	if i := slices.Index(about, any("file")); i >= 0 && i+1 < len(about) {
		message = fmt.Sprintf("%s %v", message, about[i+1])
	}
	s.problems.Handle(fmt.Errorf("OTEL_EXPORTER_OTLP_*: %s: %w", message, err))
}

func (p *problems) err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return errors.Join(p.all...)
}
