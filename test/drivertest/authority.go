package drivertest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"time"
)

// An Authority issues certificates, as a move between nodes has one for itself.
type Authority struct {
	// File has its own certificate.
	File        string
	directory   string
	key         *ecdsa.PrivateKey
	certificate *x509.Certificate
}

// NewAuthority makes one that keeps its files in a directory.
func NewAuthority(directory string) (Authority, error) {
	a := Authority{directory: directory, File: filepath.Join(directory, "ca.crt")}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return a, err
	}
	template := template("ca")
	template.IsCA, template.BasicConstraintsValid, template.KeyUsage = true, true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return a, err
	}
	a.key = key
	a.certificate, err = x509.ParseCertificate(der)
	return a, errors.Join(err, write(a.File, "CERTIFICATE", der))
}

// Issue makes a certificate for a name.
func (a Authority) Issue(name string, use x509.ExtKeyUsage) (certificateFile, keyFile string, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", err
	}
	template := template(name)
	template.DNSNames, template.KeyUsage, template.ExtKeyUsage = []string{name}, x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{use}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		return "", "", err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return "", "", err
	}
	certificateFile, keyFile = filepath.Join(a.directory, name+".crt"), filepath.Join(a.directory, name+".key")
	return certificateFile, keyFile, errors.Join(write(certificateFile, "CERTIFICATE", der), write(keyFile, "PRIVATE KEY", private))
}

func template(name string) *x509.Certificate {
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour),
	}
}

func write(file, kind string, der []byte) error {
	return os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
