package mover

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"time"
)

// The names that the certificates of the two sides have (subjectAltName, DNS). Addresses of pods are not known before.
const (
	SourceName = "source.move"
	TargetName = "target.move"
)

// Identity is what a side proves itself by. All of it is made for one move alone.
type Identity struct {
	// CertFile and KeyFile have this side's certificate, and CAFile the authority that both are of.
	CertFile, KeyFile, CAFile string
}

// Target is the configuration of the target: it takes the source alone. The files are read for each connection: they may be made anew while
// the target waits.
func (i Identity) Target() (*tls.Config, error) {
	if _, err := i.target(); err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return i.target() },
	}, nil
}

func (i Identity) target() (*tls.Config, error) {
	c, ca, err := i.load()
	if err != nil {
		return nil, err
	}
	c.ClientAuth, c.ClientCAs = tls.RequireAndVerifyClientCert, ca
	c.VerifyConnection = func(s tls.ConnectionState) error { return s.PeerCertificates[0].VerifyHostname(SourceName) }
	return c, nil
}

// Source is the configuration of the source: it speaks to the target alone.
func (i Identity) Source() (*tls.Config, error) {
	c, ca, err := i.load()
	if err != nil {
		return nil, err
	}
	c.RootCAs, c.ServerName = ca, TargetName
	return c, nil
}

func (i Identity) load() (*tls.Config, *x509.CertPool, error) {
	certificate, err := tls.LoadX509KeyPair(i.CertFile, i.KeyFile)
	if err != nil {
		return nil, nil, err
	}
	pem, err := os.ReadFile(i.CAFile)
	if err != nil {
		return nil, nil, err
	}
	ca := x509.NewCertPool()
	if !ca.AppendCertsFromPEM(pem) {
		return nil, nil, fmt.Errorf("%s has no certificate", i.CAFile)
	}
	// Without tickets each connection proves who is there anew.
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{certificate}, SessionTicketsDisabled: true}, ca, nil
}

// Listen waits for the source at an address. A connection ends whose other side is silent for so long: see watch.
func Listen(ctx context.Context, address string, i Identity, silence time.Duration) (net.Listener, error) {
	config, err := i.Target()
	if err != nil {
		return nil, err
	}
	listener, err := (&net.ListenConfig{KeepAliveConfig: keepAlive(silence)}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return tls.NewListener(watching{listener, silence}, config), nil
}

// dialAgain is how long Dialer waits before it tries again.
const dialAgain = 500 * time.Millisecond

// Dialer connects to the target at an address. It tries again as long as nothing listens there, until ctx ends. A connection ends whose
// other side is silent for so long: see watch.
func Dialer(address string, i Identity, silence time.Duration) (func(context.Context) (net.Conn, error), error) {
	if _, err := i.Source(); err != nil {
		return nil, err
	}
	dialer := &net.Dialer{Timeout: answerWithin, KeepAliveConfig: keepAlive(silence)}
	return func(ctx context.Context) (net.Conn, error) {
		for {
			conn, err := dialer.DialContext(ctx, "tcp", address)
			if err == nil {
				return secure(ctx, watch(conn, silence), i)
			}
			select {
			case <-ctx.Done():
				return nil, err
			case <-time.After(dialAgain):
			}
		}
	}, nil
}

// secure has both sides prove what they are.
func secure(ctx context.Context, conn net.Conn, i Identity) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	config, err := i.Source()
	if err == nil {
		secured := tls.Client(conn, config)
		if err = secured.HandshakeContext(ctx); err == nil {
			return secured, nil
		}
	}
	return nil, errors.Join(err, conn.Close())
}
