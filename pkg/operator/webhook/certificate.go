package webhook

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"slices"
	"time"
)

// Keys of the Secret. Those of the certificate that is served are the ones that cert-manager writes.
const (
	servedCertificate = "tls.crt"
	servedKey         = "tls.key"
	// What is served next is announced to the API server for a while before it is served, and what was served before is
	// known to it for as long as another replica may serve it.
	nextCertificate     = "next.crt"
	nextKey             = "next.key"
	previousCertificate = "previous.crt"
)

// A rotation makes certificates for a name, each of which signs itself and is good for lifetime. There is no authority whose
// key would have to be kept.
type rotation struct {
	name string
	// lifetime is that of one certificate. Its last third is for the change to the next.
	lifetime time.Duration
	// announced is how long the API server has to know a certificate before it is served.
	announced time.Duration
}

// step returns what the Secret should have now, and whether that is not what it has.
func (r rotation) step(data map[string][]byte, now time.Time) (next map[string][]byte, changed bool, err error) {
	served := parse(data[servedCertificate])
	announced := parse(data[nextCertificate])
	_, usable := tls.X509KeyPair(data[servedCertificate], data[servedKey])
	_, follows := tls.X509KeyPair(data[nextCertificate], data[nextKey])
	to := map[string][]byte{}
	switch {
	case served == nil || usable != nil || !slices.Contains(served.DNSNames, r.name) || !validAt(served, now):
		// Nothing to change from without a break: the first one, damaged content, or one of a clock that was ahead.
		to[servedCertificate], to[servedKey], err = r.issue(now)
		return to, true, err
	case announced != nil && follows == nil && validAt(announced, now):
		if now.Sub(announced.NotBefore) < skew+r.announced {
			return data, false, nil
		}
		to[servedCertificate], to[servedKey], to[previousCertificate] = data[nextCertificate], data[nextKey], data[servedCertificate]
		return to, true, nil
	case now.After(served.NotBefore.Add(skew + r.lifetime*2/3)):
		to[servedCertificate], to[servedKey] = data[servedCertificate], data[servedKey]
		to[nextCertificate], to[nextKey], err = r.issue(now)
		return to, true, err
	}
	return data, false, nil
}

// skew is how far the clocks of the API server and of another replica may be behind that of the one that issues.
const skew = 5 * time.Minute

func validAt(certificate *x509.Certificate, now time.Time) bool {
	return !now.Before(certificate.NotBefore) && now.Before(certificate.NotAfter)
}

// bundle are the certificates that the API server accepts.
func bundle(data map[string][]byte) []byte {
	return slices.Concat(data[servedCertificate], data[nextCertificate], data[previousCertificate])
}

func (r rotation) issue(now time.Time) (certificate, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		// All have a name of their own: verification finds the signer by it.
		Subject:               pkix.Name{CommonName: "hostpath-provisioner-operator-" + serial.Text(36)},
		NotBefore:             now.Add(-skew).Truncate(time.Second),
		NotAfter:              now.Add(r.lifetime),
		DNSNames:              []string{r.name},
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		return nil, nil, err
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}), nil
}

// parse returns the first certificate of a PEM text, or nil.
func parse(text []byte) *x509.Certificate {
	block, _ := pem.Decode(text)
	if block == nil {
		return nil
	}
	certificate, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil
	}
	return certificate
}

var errNoCertificate = errors.New("the webhook has no certificate yet")
