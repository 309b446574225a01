package trace

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/go-logr/logr"
)

const (
	// maxQueue is how many spans wait at most: some 2 MB.
	maxQueue = 2048
	// maxBatch is how many go with one request.
	maxBatch = 512
	// every is when what is queued is sent, at the latest.
	every = 5 * time.Second
	// requestLimit is how long a collector may take for an answer.
	requestLimit = 10 * time.Second
	// attempts, and the pause before the second, which then doubles.
	attempts = 4
	pause    = time.Second
)

// tracesPath is where collectors take traces (OTLP/HTTP, "Default URL paths").
const tracesPath = "v1/traces"

// Config says where spans go, and whose they are.
type Config struct {
	// URL is the collector's, with the path for traces.
	URL *url.URL
	// Header is sent along, such as for authentication.
	Header http.Header
	// TLS is for collectors with https; nil for the defaults.
	TLS *tls.Config
	// Service, Version and Node tell whose spans they are.
	Service, Version, Node string
	Log                    logr.Logger
}

func (c Config) resource() []attribute {
	return []attribute{
		{key: "service.name", text: c.Service},
		{key: "service.version", text: c.Version},
		{key: "service.instance.id", text: c.Node},
		{key: "k8s.node.name", text: c.Node},
	}
}

// ParseEndpoint takes the address of a collector, such as http://collector:4318, and adds
// the path for traces, unless that is there.
func ParseEndpoint(endpoint string) (*url.URL, error) {
	u, err := url.Parse(endpoint)
	if err != nil {
		return nil, err
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		return nil, fmt.Errorf("%q is not the address of a collector such as http://collector:4318", endpoint)
	}
	if !strings.HasSuffix(strings.TrimSuffix(u.Path, "/"), "/"+tracesPath) {
		u = u.JoinPath(tracesPath)
	}
	return u, nil
}

// ParseHeaders takes "key=value,key=value", the values percent-encoded, as
// OTEL_EXPORTER_OTLP_HEADERS has them.
func ParseHeaders(s string) (http.Header, error) {
	header := make(http.Header)
	for pair := range strings.SplitSeq(s, ",") {
		if strings.TrimSpace(pair) == "" {
			continue
		}
		key, value, ok := strings.Cut(pair, "=")
		key = strings.TrimSpace(key)
		decoded, err := url.PathUnescape(strings.TrimSpace(value))
		// The value may be a secret, which does not belong into a message.
		if !ok || key == "" || err != nil || strings.ContainsAny(key, " \t\r\n:") || strings.ContainsAny(decoded, "\r\n") {
			return nil, errors.New("is not key=value,key=value with percent-encoded values")
		}
		header.Add(key, decoded)
	}
	return header, nil
}

// ReadCertificates has collectors trusted by the certificates of a file, in PEM.
func ReadCertificates(file string) (*tls.Config, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(data) {
		return nil, fmt.Errorf("%s has no certificate in PEM", file)
	}
	return &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, nil
}

// Start begins to send spans. Close ends it.
func Start(config Config) *Tracer {
	ctx, cancel := context.WithCancel(context.Background())
	t := &Tracer{
		config: config,
		queue:  make(chan *Span, maxQueue),
		ending: make(chan struct{}),
		done:   make(chan struct{}),
		cancel: cancel,
	}
	go func() {
		defer close(t.done)
		t.send(ctx)
	}()
	return t
}

// Close sends what is queued, but takes no longer than ctx. It has to be the last call
// on the tracer but those of spans, which are dropped from then on.
func (t *Tracer) Close(ctx context.Context) error {
	stop := context.AfterFunc(ctx, t.cancel)
	close(t.ending)
	<-t.done
	stop()
	t.cancel()
	t.abandon()
	if dropped := t.Dropped(); dropped > 0 {
		return fmt.Errorf("%d spans did not reach the collector at %s", dropped, t.config.URL.Redacted())
	}
	return nil
}

// send sends until ctx ends, or what was queued at the end is sent.
func (t *Tracer) send(ctx context.Context) {
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: t.config.TLS, MaxIdleConns: 1, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: requestLimit, CheckRedirect: stay}
	down := false
	for {
		batch, last := t.batch(ctx)
		if len(batch) > 0 {
			err := t.deliver(ctx, client, batch)
			if err != nil {
				t.dropped.Add(lost(batch, err))
			}
			if err != nil && !down {
				t.config.Log.Error(err, "spans are dropped until the collector takes them", "collector", t.config.URL.Redacted())
			}
			if err == nil && down {
				t.config.Log.Info("the collector takes spans again", "dropped", t.Dropped())
			}
			down = err != nil
		}
		if last {
			return
		}
	}
}

// lost is how many of a batch did not arrive.
func lost(batch []*Span, err error) uint64 {
	all := uint64(len(batch))
	if r, ok := errors.AsType[*rejection](err); ok {
		return min(r.spans, all)
	}
	return all
}

// stay follows no redirect: a POST would become a GET without its spans, whose answer says
// nothing of them, and the headers of the configuration are for the collector alone.
func stay(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// batch waits for spans to send. It answers last when there will be no more.
func (t *Tracer) batch(ctx context.Context) (batch []*Span, last bool) {
	timer := time.NewTimer(every)
	defer timer.Stop()
	for len(batch) < maxBatch {
		select {
		case s := <-t.queue:
			batch = append(batch, s)
		case <-timer.C:
			return batch, false
		case <-ctx.Done():
			return batch, true
		case <-t.ending:
			return t.rest(batch)
		}
	}
	return batch, false
}

// rest is what is queued at the end, as much as goes with one request.
func (t *Tracer) rest(batch []*Span) ([]*Span, bool) {
	for len(batch) < maxBatch {
		select {
		case s := <-t.queue:
			batch = append(batch, s)
		default:
			return batch, true
		}
	}
	return batch, false
}

// deliver sends a batch, and again if the collector says that this may help.
func (t *Tracer) deliver(ctx context.Context, client *http.Client, batch []*Span) error {
	body := request(t.config, batch)
	for attempt, wait := 1, pause; ; attempt, wait = attempt+1, 2*wait {
		again, err := t.post(ctx, client, body)
		if err == nil || !again || attempt == attempts {
			return err
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		case <-t.ending:
			// One more try is all that there is time for.
			timer.Stop()
			_, err = t.post(ctx, client, body)
			return err
		}
	}
}

// post sends once. Which answers may be tried again is of OTLP/HTTP, "Retryable Response
// Codes".
func (t *Tracer) post(ctx context.Context, client *http.Client, body []byte) (again bool, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, t.config.URL.String(), bytes.NewReader(body))
	if err != nil {
		return false, err
	}
	for key, values := range t.config.Header {
		r.Header[key] = values
	}
	r.Header.Set("Content-Type", "application/x-protobuf")
	r.Header.Set("User-Agent", t.config.Service+"/"+t.config.Version)
	answer, err := client.Do(r)
	if err != nil {
		return true, err
	}
	// Read in any case, so that the connection can be used again. What cannot be read of
	// it cannot tell of spans either.
	said, _ := io.ReadAll(io.LimitReader(answer.Body, 64<<10))
	_ = answer.Body.Close()
	switch answer.StatusCode {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		again = true
	}
	if answer.StatusCode/100 != 2 {
		return again, fmt.Errorf("the collector answers %s", answer.Status)
	}
	if r := readRejection(said); r != nil {
		return false, r // not to be sent again: OTLP/HTTP, "Partial Success"
	}
	return false, nil
}

// A rejection is what a collector answers that takes a part of a batch.
type rejection struct {
	spans uint64
	why   string
}

// Error implements error.
func (r *rejection) Error() string {
	return fmt.Sprintf("the collector rejects %d spans: %s", r.spans, r.why)
}
