package move

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"time"
)

// The names in the certificates of the two sides, of pkg/mover.
const (
	sourceName = "source.move"
	targetName = "target.move"
)

// Keys of the Secret.
const (
	authorityFile = "ca.crt"
	sourceFile    = "source"
	targetFile    = "target"
)

const (
	// lifetime is that of certificates, and deadline that of a mover that has them. What ran longer is made anew, with new ones.
	lifetime = 7 * 24 * time.Hour
	deadline = 3 * 24 * time.Hour
	// skew is how far the clocks of nodes may be apart from that of the operator.
	skew = 6 * time.Hour
)

// good says whether the certificates of a Secret last for as long as a mover that has them, and are valid on nodes by now: those that were made
// while the clock was far ahead are not. A clock that is set by less than half the skew renews none that movers have.
func good(data map[string][]byte, now time.Time) bool {
	block, _ := pem.Decode(data[authorityFile])
	if block == nil {
		return false
	}
	authority, err := x509.ParseCertificate(block.Bytes)
	return err == nil && !now.Add(-skew/2).Before(authority.NotBefore) && now.Add(deadline+skew).Before(authority.NotAfter)
}

// issue makes certificates for the two sides of one move, and the authority that they are of. Its key is forgotten at once.
func issue(now time.Time) (map[string][]byte, error) {
	authority := template("move", now)
	authority.IsCA, authority.BasicConstraintsValid, authority.KeyUsage = true, true, x509.KeyUsageCertSign
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, authority, authority, key.Public(), key)
	if err != nil {
		return nil, err
	}
	data := map[string][]byte{authorityFile: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	for _, side := range []struct {
		file, name string
		use        x509.ExtKeyUsage
	}{
		{sourceFile, sourceName, x509.ExtKeyUsageClientAuth},
		{targetFile, targetName, x509.ExtKeyUsageServerAuth},
	} {
		leaf := template(side.name, now)
		leaf.DNSNames, leaf.ExtKeyUsage, leaf.KeyUsage = []string{side.name}, []x509.ExtKeyUsage{side.use}, x509.KeyUsageDigitalSignature
		own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return nil, err
		}
		der, err := x509.CreateCertificate(rand.Reader, leaf, authority, own.Public(), key)
		if err != nil {
			return nil, err
		}
		private, err := x509.MarshalPKCS8PrivateKey(own)
		if err != nil {
			return nil, err
		}
		data[side.file+".crt"] = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
		data[side.file+".key"] = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})
	}
	return data, nil
}

func template(name string, now time.Time) *x509.Certificate {
	serial := new(big.Int)
	var raw [15]byte
	_, _ = rand.Read(raw[:]) // it never fails
	serial.SetBytes(raw[:])
	return &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name + " " + serial.Text(36)},
		NotBefore: now.Add(-skew), NotAfter: now.Add(lifetime + skew),
	}
}
