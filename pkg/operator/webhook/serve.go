package webhook

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/net/netutil"
)

// The first element of the path that the API server calls. The second is a ticket.
const (
	ValidatePath = "validate"
	RestoresPath = "restores"
)

// A Server answers the calls of the API server. That has no identity that could be asked for, unless its administrator configures one, and
// any client of the network reaches the port. So only a call with a ticket is answered, which the API server has from the webhook's
// configuration: what is answered names volumes and nodes, and costs reads of all PersistentVolumes.
type Server struct {
	Address string
	// TLS changes what connections are accepted with.
	TLS func(*tls.Config)
	// Certificates are shown to clients, and know the tickets.
	Certificates Identity
	// Validate and Restores answer those who have a ticket.
	Validate, Restores http.Handler
}

// An Identity is what a server shows to clients, and what it wants to see of them.
type Identity interface {
	// Configure has connections accepted with the certificate of the moment.
	Configure(config *tls.Config)
	// accepts says whether calls with a ticket are answered.
	accepts(ticket string) bool
}

// limits bound what all clients together can use of the operator.
type limits struct {
	// connections are open at once, and each carries one call at a time. More wait until one is closed.
	connections int
	// body is how many bytes a call has.
	body int64
	// read is the time for the TLS handshake, and again for the call, answer that for the answer, and idle that between two calls.
	read, answer, idle time.Duration
}

// usual leaves room for three API servers, each of which keeps up to 25 connections for further calls.
var usual = limits{connections: 128, body: 1 << 20, read: 5 * time.Second, answer: 10 * time.Second, idle: 5 * time.Second}

// NeedLeaderElection says that all replicas serve.
func (s *Server) NeedLeaderElection() bool { return false }

// Start serves until the context ends.
func (s *Server) Start(ctx context.Context) error {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", s.Address)
	if err != nil {
		return fmt.Errorf("serve webhooks: %w", err)
	}
	return s.serve(ctx, listener, usual)
}

func (s *Server) serve(ctx context.Context, listener net.Listener, l limits) error {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true) // with HTTP/2 one connection could have many calls
	server := &http.Server{
		Handler: s.handler(l), Protocols: protocols, TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12},
		BaseContext: func(net.Listener) context.Context { return ctx },
		ReadTimeout: l.read, WriteTimeout: l.read + l.answer, IdleTimeout: l.idle, MaxHeaderBytes: 16 << 10,
	}
	s.TLS(server.TLSConfig)
	s.Certificates.Configure(server.TLSConfig)
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		// The calls under way end with the context, and are answered.
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.read)
		defer cancel()
		if err := server.Shutdown(within); err != nil {
			_ = server.Close()
		}
	})
	err := server.ServeTLS(netutil.LimitListener(listener, l.connections), "", "")
	if !stop() {
		<-ended
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve webhooks on %s: %w", listener.Addr(), err)
}

// handler answers calls with a ticket, and closes the connections of other clients before their call is read.
func (s *Server) handler(l limits) http.Handler {
	handlers := map[string]http.Handler{}
	for path, handler := range map[string]http.Handler{ValidatePath: s.Validate, RestoresPath: s.Restores} {
		handlers[path] = http.TimeoutHandler(handler, l.answer, "")
	}
	return http.HandlerFunc(func(w http.ResponseWriter, call *http.Request) {
		path, ticket, _ := strings.Cut(strings.TrimPrefix(call.URL.Path, "/"), "/")
		handler := handlers[path]
		switch {
		case handler == nil || !s.Certificates.accepts(ticket):
			w.Header().Set("Connection", "close")
			http.NotFound(w, call)
		case call.ContentLength > l.body:
			w.Header().Set("Connection", "close")
			http.Error(w, "too large", http.StatusRequestEntityTooLarge)
		default:
			call.Body = http.MaxBytesReader(w, call.Body, l.body)
			handler.ServeHTTP(w, call)
		}
	})
}

// ticketOf is the ticket that goes with the key of a certificate, so that it is kept and renewed with that. It does not show the key.
func ticketOf(key []byte) string {
	code := hmac.New(sha256.New, key)
	code.Write([]byte("path of the webhooks"))
	return hex.EncodeToString(code.Sum(nil))
}
