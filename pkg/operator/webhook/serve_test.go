package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// A port is one that a server of webhooks serves.
type port struct {
	*harness
	address string
	client  *http.Client
	// validate and restores are called with the calls that the server lets through.
	validate, restores func(http.ResponseWriter, *http.Request)
}

func newPort(t *testing.T, l limits) *port {
	t.Helper()
	p := &port{harness: newHarness(t, nil, 1)}
	must.Succeed(t, p.replicas[0].refresh(t.Context()))
	p.serve(l, p.replicas[0])
	return p
}

// serve has a server answer on the port until the test ends.
func (p *port) serve(l limits, identity Identity) {
	t := p.t
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	p.address = listener.Addr().String()
	server := &Server{
		TLS: func(*tls.Config) {}, Certificates: identity,
		Validate: http.HandlerFunc(func(w http.ResponseWriter, call *http.Request) { p.validate(w, call) }),
		Restores: http.HandlerFunc(func(w http.ResponseWriter, call *http.Request) { p.restores(w, call) }),
	}
	p.client = &http.Client{Transport: &http.Transport{TLSClientConfig: p.trusting()}}
	ctx, end := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.serve(ctx, listener, l) }()
	t.Cleanup(func() {
		p.client.CloseIdleConnections()
		end()
		must.Succeed(t, <-done)
	})
}

// trusting is what the API server connects with.
func (p *port) trusting() *tls.Config {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(p.caBundle())
	return &tls.Config{RootCAs: roots, ServerName: service + ".storage.svc"}
}

// call calls a path, and returns the status of the answer.
func (p *port) call(path string, body io.Reader) (status int, closed bool) {
	p.t.Helper()
	request, err := http.NewRequestWithContext(p.t.Context(), http.MethodPost, "https://"+p.address+path, body)
	must.Succeed(p.t, err)
	answer, err := p.client.Do(request)
	must.Succeed(p.t, err)
	_, err = io.Copy(io.Discard, answer.Body)
	must.Succeed(p.t, errors.Join(err, answer.Body.Close()))
	return answer.StatusCode, answer.Close
}

// unread fails a test if it is read.
type unread struct{ closed chan struct{} }

func (u unread) Read([]byte) (int, error) {
	<-u.closed
	return 0, io.EOF
}

// Any client of the network reaches the port. Only the path that the API server is told leads anywhere, and a call to another one costs no
// more than its header.
func TestOnlyTheAPIServerIsAnswered(t *testing.T) {
	p := newPort(t, usual)
	var validated, restored atomic.Int32
	p.validate = func(http.ResponseWriter, *http.Request) { validated.Add(1) }
	p.restores = func(http.ResponseWriter, *http.Request) { restored.Add(1) }
	ticket := strings.TrimPrefix(p.path(), "/validate/")
	for step := range strings.SplitSeq(strings.TrimPrefix(p.path(), "/"), "/") {
		if problems := validation.IsDNS1123Subdomain(step); len(problems) > 0 {
			t.Errorf("the API server takes no configuration with the path %s: %q", p.path(), problems)
		}
	}
	for _, path := range []string{
		"/", "/validate", "/validate/", "/restores/", "/validate/" + strings.Repeat("0", len(ticket)), "/validate/" + ticket[1:], "/validate/" + ticket + "/more",
		"/" + ticket, "/metrics", "/validate-hostpathprovisioner-kubevirt-io-v1beta1-hostpathprovisioner", "/mutate-v1-persistentvolumeclaim",
	} {
		body := unread{make(chan struct{})} // that is never sent
		status, closed := p.call(path, body)
		close(body.closed)
		if status != http.StatusNotFound || !closed {
			t.Errorf("%s: status %d, closed: %v", path, status, closed)
		}
	}
	if validated.Load()+restored.Load() > 0 {
		t.Error("a call without the ticket was let through")
	}
	for path, calls := range map[string]*atomic.Int32{p.path(): &validated, "/restores/" + ticket: &restored} {
		if status, _ := p.call(path, strings.NewReader("{}")); status != http.StatusOK || calls.Load() != 1 {
			t.Errorf("%s: status %d, %d calls", path, status, calls.Load())
		}
	}
}

func TestLargeCallIsRefused(t *testing.T) {
	l := usual
	l.body = 1000
	p := newPort(t, l)
	p.validate = func(w http.ResponseWriter, call *http.Request) {
		if _, err := io.ReadAll(call.Body); err != nil {
			http.Error(w, err.Error(), http.StatusTeapot)
		}
	}
	long := bytes.Repeat([]byte("x"), 1001)
	for name, test := range map[string]struct {
		body io.Reader
		want int
	}{
		"what fits":                    {bytes.NewReader(long[1:]), http.StatusOK},
		"one byte more":                {bytes.NewReader(long), http.StatusRequestEntityTooLarge},
		"of a length that is not told": {io.MultiReader(bytes.NewReader(long)), http.StatusTeapot},
	} {
		if status, _ := p.call(p.path(), test.body); status != test.want {
			t.Errorf("%s: status %d, want %d", name, status, test.want)
		}
	}
}

func TestSlowCallerIsDisconnected(t *testing.T) {
	l := usual
	l.read, l.idle = 5*time.Second, 5*time.Second // which a handshake has to fit in, on a busy machine too
	p := newPort(t, l)
	p.validate = func(_ http.ResponseWriter, call *http.Request) { _, _ = io.ReadAll(call.Body) }
	for name, text := range map[string]string{
		"nothing":        "",
		"half a header":  "POST " + p.path() + " HTTP/1.1\r\nHost: ",
		"half of a call": "POST " + p.path() + " HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf",
		"no handshake":   "no TLS",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			connection, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", p.address)
			must.Succeed(t, err)
			defer func() { _ = connection.Close() }()
			if text != "no TLS" {
				secure := tls.Client(connection, p.trusting())
				must.Succeed(t, secure.HandshakeContext(t.Context()))
				connection = secure
				_, err = connection.Write([]byte(text))
				must.Succeed(t, err)
			}
			must.Succeed(t, connection.SetReadDeadline(time.Now().Add(time.Minute)))
			if _, err := io.Copy(io.Discard, connection); isTimeout(err) {
				t.Errorf("the connection is still open: %v", err)
			}
		})
	}
}

func isTimeout(err error) bool {
	var failed net.Error
	return errors.As(err, &failed) && failed.Timeout()
}

// What a call reads of the API server ends when the call has had its time.
func TestStuckCheckIsAnswered(t *testing.T) {
	l := usual
	l.answer = 50 * time.Millisecond
	p := newPort(t, l)
	ended := make(chan struct{})
	p.validate = func(_ http.ResponseWriter, call *http.Request) {
		<-call.Context().Done()
		close(ended)
	}
	if status, _ := p.call(p.path(), strings.NewReader("{}")); status != http.StatusServiceUnavailable {
		t.Errorf("status %d", status)
	}
	<-ended
}

// Connections beyond the limit are accepted when others end: so many calls are at work at once, and no more.
func TestExcessCallersWait(t *testing.T) {
	const most, all = 2, 6
	l := usual
	l.connections = most
	p := newPort(t, l)
	full, leave := make(chan struct{}, all), make(chan struct{})
	var open, reached atomic.Int32
	p.validate = func(w http.ResponseWriter, _ *http.Request) {
		now := open.Add(1)
		for seen := reached.Load(); now > seen && !reached.CompareAndSwap(seen, now); seen = reached.Load() {
		}
		full <- struct{}{}
		<-leave
		w.Header().Set("Connection", "close")
		open.Add(-1)
	}
	var calls sync.WaitGroup
	for range all {
		calls.Go(func() {
			if status, _ := p.call(p.path(), strings.NewReader("{}")); status != http.StatusOK {
				t.Errorf("status %d", status)
			}
		})
	}
	for range most {
		<-full
	}
	close(leave)
	calls.Wait()
	if got := reached.Load(); got != most {
		t.Errorf("%d calls were at work at once, want %d", got, most)
	}
}
