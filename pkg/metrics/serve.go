package metrics

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"

	"kubevirt.io/hostpath-provisioner/pkg/tlsprofile"
)

// TLS is how the metrics are served. Without files the certificate is the
// driver's own, signed by itself.
type TLS struct {
	CertFile, KeyFile string
	// Namespace is that of the Service in the names of a certificate that this package makes; $POD_NAMESPACE if it is empty.
	Namespace string
	// Accepted are versions and cipher suites.
	Accepted tlsprofile.Profile
}

// Check returns what is wrong with the files.
func (t TLS) Check() error {
	if t.CertFile == "" {
		return nil
	}
	_, err := newCertificates(t).current()
	return err
}

// Serve serves /metrics on the listener until ctx ends, and then ends the calls
// in flight.
func (m *Metrics) Serve(ctx context.Context, listener net.Listener, config TLS) error {
	return m.serve(ctx, listener, config, usual)
}

func (m *Metrics) serve(ctx context.Context, listener net.Listener, config TLS, l limits) error {
	certificate := newCertificates(config)
	if _, err := certificate.current(); err != nil {
		return errors.Join(err, listener.Close())
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		MaxRequestsInFlight: l.requests,
		DisableCompression:  true, // to compress some kilobytes would take two MiB of memory
	}))
	server := l.server()
	server.Handler = mux
	server.TLSConfig = &tls.Config{
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return certificate.current() },
	}
	config.Accepted.Configure(server.TLSConfig)
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.ServeTLS(netutil.LimitListener(listener, l.connections), "", ""); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics on %s: %w", listener.Addr(), err)
	}
	return nil
}

// certificates is the certificate of now: files are read again when they change,
// and an own one is made anew before it expires.
type certificates struct {
	config TLS

	mu       sync.Mutex
	loaded   *tls.Certificate
	modified time.Time // of the files
	renew    time.Time // of an own certificate
}

func newCertificates(config TLS) *certificates { return &certificates{config: config} }

func (c *certificates) current() (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.config.CertFile != "" {
		return c.fromFiles()
	}
	if c.loaded != nil && time.Now().Before(c.renew) {
		return c.loaded, nil
	}
	certificate, err := selfSigned(time.Now(), cmp.Or(c.config.Namespace, os.Getenv("POD_NAMESPACE")))
	if err != nil {
		return nil, fmt.Errorf("make a certificate for the metrics: %w", err)
	}
	c.loaded, c.renew = certificate, time.Now().Add(lifetime/2)
	return certificate, nil
}

func (c *certificates) fromFiles() (*tls.Certificate, error) {
	info, err := os.Stat(c.config.CertFile)
	if err != nil {
		return nil, fmt.Errorf("metrics certificate: %w", err)
	}
	if c.loaded != nil && info.ModTime().Equal(c.modified) {
		return c.loaded, nil
	}
	certificate, err := tls.LoadX509KeyPair(c.config.CertFile, c.config.KeyFile)
	if err != nil && c.loaded != nil {
		return c.loaded, nil // one file of the two is new: the pair follows
	}
	if err != nil {
		return nil, fmt.Errorf("metrics certificate %s, key %s: %w", c.config.CertFile, c.config.KeyFile, err)
	}
	c.loaded, c.modified = &certificate, info.ModTime()
	return c.loaded, nil
}

const lifetime = 365 * 24 * time.Hour

func selfSigned(now time.Time, namespace string) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "hostpath-csi-driver"},
		NotBefore:    now.Add(-time.Hour),
		NotAfter:     now.Add(lifetime),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:     []string{"localhost"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	if ip := net.ParseIP(os.Getenv("POD_IP")); ip != nil {
		template.IPAddresses = append(template.IPAddresses, ip)
	}
	if service := os.Getenv("SERVICE_NAME"); service != "" && namespace != "" {
		template.DNSNames = append(template.DNSNames, service+"."+namespace+".svc")
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
