package tlsprofile

import (
	"crypto/tls"
	"fmt"
	"slices"
	"strings"
)

// Settings are a profile in the words of who configures it: tlsSecurityProfile of OpenShift's APIServer, and two
// variables that go before it.
type Settings struct {
	// Type is Old, Intermediate, Modern or Custom. Anything else is Intermediate.
	Type string
	// Ciphers and MinVersion are those of a Custom profile.
	Ciphers    []string
	MinVersion string
	// CiphersOverride has names with commas between them. MinVersionOverride is a name. Each goes before the profile if it
	// is not empty.
	CiphersOverride, MinVersionOverride string
}

const (
	gcmAndChaCha = "ECDHE-ECDSA-AES128-GCM-SHA256,ECDHE-RSA-AES128-GCM-SHA256,ECDHE-ECDSA-AES256-GCM-SHA384," +
		"ECDHE-RSA-AES256-GCM-SHA384,ECDHE-ECDSA-CHACHA20-POLY1305,ECDHE-RSA-CHACHA20-POLY1305"
	cbcAndRSA = "ECDHE-ECDSA-AES128-SHA256,ECDHE-RSA-AES128-SHA256,ECDHE-ECDSA-AES128-SHA,ECDHE-RSA-AES128-SHA," +
		"ECDHE-ECDSA-AES256-SHA,ECDHE-RSA-AES256-SHA,AES128-GCM-SHA256,AES256-GCM-SHA384,AES128-SHA256,AES128-SHA,AES256-SHA,DES-CBC3-SHA"
)

// Profile is what the settings ask for. Problems are parts of them that are not usable, in words. What cannot be
// understood never makes a server accept more: without a usable suite it accepts only TLS 1.3, and a lowest version
// that is not known is TLS 1.3.
func (s Settings) Profile() (p Profile, problems []string) {
	ciphers, version := split(gcmAndChaCha), "VersionTLS12"
	switch s.Type {
	case "Old":
		ciphers, version = split(gcmAndChaCha+","+cbcAndRSA), "VersionTLS10"
	case "Modern":
		version = "VersionTLS13"
	case "Custom":
		// OpenShift lets a Custom profile have no content.
		if len(s.Ciphers) == 0 && s.MinVersion == "" {
			problems = append(problems, "the Custom profile is empty, Intermediate is used")
			break
		}
		ciphers = s.Ciphers
		if s.MinVersion != "" {
			version = s.MinVersion
		}
	case "", "Intermediate":
	default:
		problems = append(problems, fmt.Sprintf("the profile %q is not known, Intermediate is used", s.Type))
	}
	if s.CiphersOverride != "" {
		ciphers = split(s.CiphersOverride)
	}
	if s.MinVersionOverride != "" {
		version = s.MinVersionOverride
	}
	var err error
	if p.MinVersion, err = ParseVersion(version); err != nil {
		problems = append(problems, "the lowest version "+err.Error()+", VersionTLS13 is used")
		p.MinVersion = tls.VersionTLS13
	}
	suites, unknown := known(ciphers)
	if len(unknown) > 0 {
		problems = append(problems, "ciphers that Go does not have are left out: "+strings.Join(unknown, ", "))
	}
	p.CipherSuites = slices.DeleteFunc(suites, ofTLS13)
	if len(p.CipherSuites) == 0 {
		p.MinVersion = tls.VersionTLS13
	}
	if p.MinVersion == tls.VersionTLS13 {
		p.CipherSuites = nil
	}
	return p, problems
}

// ofTLS13 says whether a suite is one of TLS 1.3, all of which are always accepted.
func ofTLS13(id uint16) bool {
	return slices.ContainsFunc(tls.CipherSuites(), func(s *tls.CipherSuite) bool {
		return s.ID == id && slices.Equal(s.SupportedVersions, []uint16{tls.VersionTLS13})
	})
}
