package metrics

import (
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/net/netutil"
)

// limits are what clients can have of the driver together: whoever reaches the port is one.
type limits struct {
	// connections are those that are open at once. More wait for one to be closed.
	connections int
	// perAddress are those of one client. More are closed at once.
	perAddress int
	// requests are those that are answered at once, each of which has a copy of what is
	// shown in memory. More are refused.
	requests int
	// read is the time for shaking hands, and once more for the request; write that for the
	// answer. They also bound how long a connection is open, since it has one request.
	read, write time.Duration
}

// usual has no connection open for much longer than 20 seconds. One client can neither have
// all of them nor all that is answered at once, and so cannot keep Prometheus out.
var usual = limits{connections: 64, perAddress: 6, requests: 8, read: 5 * time.Second, write: 10 * time.Second}

const headerBytes = 16 << 10

func (l limits) server() *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true) // with HTTP/2 one connection could have many requests
	server := &http.Server{
		Protocols:      protocols,
		ReadTimeout:    l.read, // of the handshake too
		WriteTimeout:   l.write,
		MaxHeaderBytes: headerBytes,
	}
	// A client that asks now and then would keep its connection for ever.
	server.SetKeepAlivesEnabled(false)
	return server
}

func (l limits) listener(inner net.Listener) net.Listener {
	return netutil.LimitListener(&perAddress{Listener: inner, most: l.perAddress, open: make(map[string]int)}, l.connections)
}

// A perAddress listener closes connections of addresses that have enough of them.
type perAddress struct {
	net.Listener
	most int

	mu   sync.Mutex
	open map[string]int
}

func (p *perAddress) Accept() (net.Conn, error) {
	for {
		conn, err := p.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if from := address(conn); p.admit(from) {
			return &admitted{Conn: conn, leave: sync.OnceFunc(func() { p.leave(from) })}, nil
		}
		_ = conn.Close()
	}
}

func (p *perAddress) admit(from string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open[from] >= p.most {
		return false
	}
	p.open[from]++
	return true
}

func (p *perAddress) leave(from string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open[from]--; p.open[from] == 0 {
		delete(p.open, from)
	}
}

type admitted struct {
	net.Conn
	leave func()
}

func (a *admitted) Close() error {
	defer a.leave()
	return a.Conn.Close()
}

// address is that of a client, without its port.
func address(conn net.Conn) string {
	host, _, err := net.SplitHostPort(conn.RemoteAddr().String())
	if err != nil {
		return conn.RemoteAddr().String()
	}
	return host
}
