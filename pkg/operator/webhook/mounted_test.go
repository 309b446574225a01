package webhook

import (
	"bytes"
	"crypto/x509"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// The Operator Lifecycle Manager mounts a certificate, renews it, and configures the webhooks with paths that a ClusterServiceVersion has.
func TestMountedCertificate(t *testing.T) {
	p := &port{harness: newHarness(t, nil, 1)}
	dir := t.TempDir()
	write := func() []byte {
		certificate, key, err := p.replicas[0].rotation.issue(time.Now())
		must.Succeed(t, err)
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "tls.key"), key, 0o600))
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "tls.crt"), certificate, 0o600))
		return certificate
	}
	if _, err := NewMounted(dir); err == nil {
		t.Fatal("there is no certificate, and no error")
	}
	first := write()
	mounted, err := NewMounted(dir)
	must.Succeed(t, err)
	p.serve(usual, mounted)
	transport, ok := p.client.Transport.(*http.Transport)
	if !ok {
		t.Fatalf("the client has the transport %T", p.client.Transport)
	}
	trust := func(certificate []byte) {
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(certificate)
		p.client.CloseIdleConnections()
		transport.TLSClientConfig.RootCAs = roots
	}
	var validated, restored atomic.Int32
	p.validate = func(http.ResponseWriter, *http.Request) { validated.Add(1) }
	p.restores = func(http.ResponseWriter, *http.Request) { restored.Add(1) }
	trust(first)
	for path, want := range map[string]int{
		"/validate": http.StatusOK, "/restores": http.StatusOK, "/": http.StatusNotFound, "/metrics": http.StatusNotFound, "/validate/more": http.StatusNotFound,
	} {
		if status, _ := p.call(path, strings.NewReader("{}")); status != want {
			t.Errorf("%s: status %d, want %d", path, status, want)
		}
	}
	if validated.Load() != 1 || restored.Load() != 1 {
		t.Errorf("%d calls and %d, want one of each", validated.Load(), restored.Load())
	}

	second := write()
	if bytes.Equal(first, second) {
		t.Fatal("the certificate is the same")
	}
	must.Succeed(t, mounted.ReadCertificate())
	trust(second)
	if status, _ := p.call("/validate", strings.NewReader("{}")); status != http.StatusOK {
		t.Errorf("renewed: status %d", status)
	}
}
