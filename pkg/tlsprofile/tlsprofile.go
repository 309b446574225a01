// Package tlsprofile reads which versions and cipher suites a TLS server accepts: from flags, and from the profiles of
// OpenShift, which are those of Mozilla (https://wiki.mozilla.org/Security/Server_Side_TLS).
package tlsprofile

import (
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// A Profile is what a server accepts.
type Profile struct {
	// MinVersion is the lowest version, as in crypto/tls. 0 is that of crypto/tls.
	MinVersion uint16
	// CipherSuites are those of TLS 1.2 and older; nil for those of crypto/tls. The suites of TLS 1.3 cannot be chosen.
	CipherSuites []uint16
}

// Configure sets what a server accepts. It does not change the rest of the configuration.
func (p Profile) Configure(c *tls.Config) {
	c.MinVersion, c.CipherSuites = p.MinVersion, slices.Clone(p.CipherSuites)
}

// versions are the names that crypto/tls and OpenShift have.
var versions = map[string]uint16{
	"VersionTLS10": tls.VersionTLS10,
	"VersionTLS11": tls.VersionTLS11,
	"VersionTLS12": tls.VersionTLS12,
	"VersionTLS13": tls.VersionTLS13,
}

// Parse takes a lowest version and suites as ParseVersion and ParseSuites do, and reports the problems of both.
func Parse(version, suites string) (p Profile, err error) {
	var wrongVersion, wrongSuites error
	p.MinVersion, wrongVersion = ParseVersion(version)
	p.CipherSuites, wrongSuites = ParseSuites(suites)
	return p, errors.Join(wrongVersion, wrongSuites)
}

// ParseVersion takes the names of crypto/tls.
func ParseVersion(name string) (uint16, error) {
	version, ok := versions[name]
	if !ok {
		return 0, fmt.Errorf("%q is not one of VersionTLS10, VersionTLS11, VersionTLS12, VersionTLS13", name)
	}
	return version, nil
}

// VersionName is the name that ParseVersion takes.
func VersionName(version uint16) string {
	for name, number := range versions {
		if number == version {
			return name
		}
	}
	return "VersionTLS12" // the lowest of crypto/tls since Go 1.22
}

// ParseSuites takes names with commas between them, none for the suites of crypto/tls. A name that is not known is an
// error.
func ParseSuites(names string) ([]uint16, error) {
	suites, unknown := known(split(names))
	if len(unknown) > 0 {
		return nil, fmt.Errorf("%s: not known to crypto/tls", strings.Join(unknown, ", "))
	}
	return suites, nil
}

// SuiteNames are the names that ParseSuites takes, sorted.
func SuiteNames(suites []uint16) string {
	var names []string
	for _, suite := range suites {
		names = append(names, tls.CipherSuiteName(suite))
	}
	slices.Sort(names)
	return strings.Join(names, ",")
}

func split(names string) []string {
	var found []string
	for name := range strings.SplitSeq(names, ",") {
		if name = strings.TrimSpace(name); name != "" {
			found = append(found, name)
		}
	}
	return found
}

// known are the suites of the names, in the words of crypto/tls or of OpenSSL, and the names that crypto/tls has no suite
// for.
func known(names []string) (suites []uint16, unknown []string) {
	for _, name := range names {
		suite, ok := suiteOf(name)
		if !ok {
			unknown = append(unknown, name)
			continue
		}
		if !slices.Contains(suites, suite) {
			suites = append(suites, suite)
		}
	}
	return suites, unknown
}

func suiteOf(name string) (uint16, bool) {
	if other, ok := openSSL[name]; ok {
		name = other
	}
	for _, suite := range slices.Concat(tls.CipherSuites(), tls.InsecureCipherSuites()) {
		if suite.Name == name {
			return suite.ID, true
		}
	}
	return 0, false
}

// openSSL has the names that OpenSSL has of suites of TLS 1.2 and older which crypto/tls has too.
var openSSL = map[string]string{
	"ECDHE-ECDSA-AES128-GCM-SHA256": "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
	"ECDHE-RSA-AES128-GCM-SHA256":   "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
	"ECDHE-ECDSA-AES256-GCM-SHA384": "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
	"ECDHE-RSA-AES256-GCM-SHA384":   "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
	"ECDHE-ECDSA-CHACHA20-POLY1305": "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
	"ECDHE-RSA-CHACHA20-POLY1305":   "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
	"ECDHE-ECDSA-AES128-SHA256":     "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
	"ECDHE-RSA-AES128-SHA256":       "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
	"ECDHE-ECDSA-AES128-SHA":        "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
	"ECDHE-RSA-AES128-SHA":          "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
	"ECDHE-ECDSA-AES256-SHA":        "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
	"ECDHE-RSA-AES256-SHA":          "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
	"AES128-GCM-SHA256":             "TLS_RSA_WITH_AES_128_GCM_SHA256",
	"AES256-GCM-SHA384":             "TLS_RSA_WITH_AES_256_GCM_SHA384",
	"AES128-SHA256":                 "TLS_RSA_WITH_AES_128_CBC_SHA256",
	"AES128-SHA":                    "TLS_RSA_WITH_AES_128_CBC_SHA",
	"AES256-SHA":                    "TLS_RSA_WITH_AES_256_CBC_SHA",
	"DES-CBC3-SHA":                  "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
}
