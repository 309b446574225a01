package metrics

import (
	"net/http"
	"time"
)

// limits bound what all clients together can use of the driver: any program that reaches the port is one.
type limits struct {
	// connections are open at once. More wait until one is closed.
	connections int
	// requests are answered at once, each with a copy of the metrics in memory. More are
	// refused.
	requests int
	// read is the time for the TLS handshake, and again for the request; write is that for the
	// response. A connection carries one request, so they bound how long it is open.
	read, write time.Duration
}

// usual closes each connection after 20 seconds at most.
var usual = limits{connections: 64, requests: 8, read: 5 * time.Second, write: 10 * time.Second}

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
	// Or a client that asks now and then would keep its connection for ever.
	server.SetKeepAlivesEnabled(false)
	return server
}
