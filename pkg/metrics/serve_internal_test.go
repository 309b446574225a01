package metrics

import (
	"crypto/tls"
	"crypto/x509"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestSelfSignedCertificateIsRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		certificates := newCertificates(TLS{})
		first := current(t, certificates)
		time.Sleep(lifetime/2 - time.Second)
		if current(t, certificates) != first {
			t.Error("it is renewed before half of its time")
		}
		for range 4 {
			time.Sleep(lifetime / 2)
			second := current(t, certificates)
			if second == first {
				t.Error("it is not renewed after half of its time")
			}
			first = second
		}
	})
}

// current is the certificate of now, which is good now.
func current(t *testing.T, c *certificates) *tls.Certificate {
	t.Helper()
	certificate, err := c.current()
	must.Succeed(t, err)
	parsed, err := x509.ParseCertificate(certificate.Certificate[0])
	must.Succeed(t, err)
	if now := time.Now(); now.Before(parsed.NotBefore) || now.After(parsed.NotAfter) {
		t.Errorf("at %v the certificate is good from %v to %v", now, parsed.NotBefore, parsed.NotAfter)
	}
	return certificate
}
