package metrics

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const request = "GET /metrics HTTP/1.1\r\nHost: driver\r\n\r\n"

// patient has no client closed because of the time that it takes.
var patient = limits{connections: 10, requests: 10, read: time.Hour, write: time.Hour}

// brief has a connection for so many at once, and not for long.
func brief(connections int) limits {
	l := patient
	l.connections, l.read, l.write = connections, 5*time.Second, 5*time.Second
	return l
}

// serveWithin serves metrics with these limits until the test ends.
func serveWithin(t *testing.T, l limits, o Options) (address string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	return serveOn(t, listener, l, o)
}

func serveOn(t *testing.T, listener net.Listener, l limits, o Options) (address string) {
	t.Helper()
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	served := make(chan error, 1)
	go func() { served <- New(o).serve(ctx, listener, TLS{}, l) }()
	t.Cleanup(func() {
		stop()
		must.Succeed(t, <-served)
	})
	return listener.Addr().String()
}

func noPools() []pool.Status { return nil }

// dial connects. What the connection is used for ends
// with the test, and long before that if it hangs.
func dial(t *testing.T, to string) net.Conn {
	t.Helper()
	var dialer net.Dialer
	conn, err := dialer.DialContext(t.Context(), "tcp", to)
	must.Succeed(t, err)
	t.Cleanup(func() { conn.Close() })
	must.Succeed(t, conn.SetDeadline(time.Now().Add(time.Minute)))
	return conn
}

// shake makes a connection of TLS, once the server has taken it.
func shake(t *testing.T, conn net.Conn) *tls.Conn {
	t.Helper()
	secure := tls.Client(conn, &tls.Config{InsecureSkipVerify: true})
	must.Succeed(t, secure.HandshakeContext(t.Context()))
	return secure
}

// get asks for the metrics, and answers the status.
func get(conn net.Conn) (int, error) {
	if _, err := io.WriteString(conn, request); err != nil {
		return 0, err
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, err
	}
	_, err = io.Copy(io.Discard, response.Body)
	return response.StatusCode, errors.Join(err, response.Body.Close())
}

func ask(t *testing.T, conn net.Conn) int {
	t.Helper()
	status, err := get(conn)
	must.Succeed(t, err)
	return status
}

func wantServed(t *testing.T, address string) {
	t.Helper()
	if status := ask(t, shake(t, dial(t, address))); status != http.StatusOK {
		t.Errorf("a scrape is answered with %d", status)
	}
}

// wantClosed reads until the server closes the connection.
func wantClosed(t *testing.T, conn net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the connection is still open after a minute")
	}
}

// drip sends how a request begins, and then a bit more now and then, until it is not taken any more.
func drip(conn net.Conn, begin, more string) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for next := begin; ; next = more {
		if _, err := io.WriteString(conn, next); err != nil {
			return
		}
		<-tick.C
	}
}

// What holds the only connection there is holds it for a while, and then the next is served.
func TestSlowClientIsDisconnected(t *testing.T) {
	testenv.NeedTime(t)
	for name, hold := range map[string]func(t *testing.T, conn net.Conn){
		"who sends nothing":       func(*testing.T, net.Conn) {},
		"who asks for nothing":    func(t *testing.T, conn net.Conn) { shake(t, conn) },
		"who shakes hands slowly": func(_ *testing.T, conn net.Conn) { drip(conn, "\x16\x03\x01\x40\x00", "\x00") },
		"who asks slowly":         func(t *testing.T, conn net.Conn) { drip(shake(t, conn), "GET /metrics HTTP/1.1\r\nX: ", "x") },
		"a client that sends more than is read": func(t *testing.T, conn net.Conn) {
			drip(shake(t, conn), strings.Replace(request, "\r\n\r\n", "\r\nContent-Length: 99999\r\n\r\n", 1), "x")
		},
		"who was answered":         func(t *testing.T, conn net.Conn) { ask(t, shake(t, conn)) },
		"who asks again and again": func(t *testing.T, conn net.Conn) { drip(shake(t, conn), request, request) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := serveWithin(t, brief(1), Options{Pools: noPools})
			conn := dial(t, address)
			hold(t, conn)
			wantServed(t, address)
			wantClosed(t, conn)
		})
	}
}

func TestClientThatDoesNotReadIsDisconnected(t *testing.T) {
	testenv.NeedTime(t)
	var scrapes atomic.Int64
	address := serveWithin(t, brief(1), Options{Pools: noPools, Volumes: func() []pool.Surveyed {
		if scrapes.Add(1) > 1 {
			return nil
		}
		// More than the kernel takes for a reader.
		return slices.Collect(func(yield func(pool.Surveyed) bool) {
			for i := range 20_000 {
				id, err := volume.ParseID(fmt.Sprintf("%0200d", i))
				must.Succeed(t, err)
				yield(pool.Surveyed{ID: id})
			}
		})
	}})
	conn := shake(t, dial(t, address))
	_, err := io.WriteString(conn, request)
	must.Succeed(t, err)
	wantServed(t, address)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err == nil {
		_, err = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close() // which reports the same
	}
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("it reads an answer with %v, want it cut off", err)
	}
}

// A counted listener knows how many connections were open at once.
type counted struct {
	net.Listener
	open, most atomic.Int64
}

func (c *counted) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c.most.Store(max(c.most.Load(), c.open.Add(1)))
	return &countedConn{Conn: conn, closed: sync.OnceFunc(func() { c.open.Add(-1) })}, nil
}

type countedConn struct {
	net.Conn
	closed func()
}

func (c *countedConn) Close() error {
	defer c.closed()
	return c.Conn.Close()
}

func TestExcessConnectionsWait(t *testing.T) {
	const bound, clients = 2, 12
	l := patient
	l.connections = bound
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	listener := &counted{Listener: inner}
	address := serveOn(t, listener, l, Options{Pools: noPools})
	waiting := make([]net.Conn, clients)
	for i := range waiting {
		waiting[i] = dial(t, address)
	}
	var served sync.WaitGroup
	for _, conn := range waiting {
		served.Go(func() {
			secure := tls.Client(conn, &tls.Config{InsecureSkipVerify: true})
			if status, err := get(secure); err != nil || status != http.StatusOK {
				t.Errorf("a scrape that waited is answered with %d, %v", status, err)
			}
			conn.Close()
		})
	}
	served.Wait()
	if most := listener.most.Load(); most > bound {
		t.Errorf("%d connections were open at once, want at most %d", most, bound)
	}
}

func TestExcessRequestsAreRefused(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	l := patient
	l.requests = 2
	address := serveWithin(t, l, Options{Pools: func() []pool.Status {
		begun <- struct{}{}
		<-release
		return nil
	}})
	answered := make(chan int)
	for range l.requests {
		conn := shake(t, dial(t, address))
		go func() {
			status, _ := get(conn)
			answered <- status
		}()
		<-begun
	}
	if status := ask(t, shake(t, dial(t, address))); status != http.StatusServiceUnavailable {
		t.Errorf("one more request is answered with %d, want %d", status, http.StatusServiceUnavailable)
	}
	close(release)
	for range l.requests {
		if status := <-answered; status != http.StatusOK {
			t.Errorf("a request before it is answered with %d", status)
		}
	}
}
