package tlsprofile_test

import (
	"crypto/tls"
	"slices"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/tlsprofile"
)

func TestProfile(t *testing.T) {
	const (
		gcm  = tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256
		cbc  = tls.TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA
		tdes = tls.TLS_RSA_WITH_3DES_EDE_CBC_SHA
	)
	tests := map[string]struct {
		settings tlsprofile.Settings
		version  uint16
		has, not []uint16
		problem  string
	}{
		"nothing is said":                      {tlsprofile.Settings{}, tls.VersionTLS12, []uint16{gcm}, []uint16{cbc, tdes}, ""},
		"Intermediate":                         {tlsprofile.Settings{Type: "Intermediate"}, tls.VersionTLS12, []uint16{gcm}, []uint16{cbc, tdes}, ""},
		"Old":                                  {tlsprofile.Settings{Type: "Old"}, tls.VersionTLS10, []uint16{gcm, cbc, tdes}, nil, ""},
		"Modern":                               {tlsprofile.Settings{Type: "Modern"}, tls.VersionTLS13, nil, []uint16{gcm}, ""},
		"unknown profile":                      {tlsprofile.Settings{Type: "Future"}, tls.VersionTLS12, []uint16{gcm}, []uint16{cbc}, `"Future" is not known`},
		"Custom without content":               {tlsprofile.Settings{Type: "Custom"}, tls.VersionTLS12, []uint16{gcm}, []uint16{cbc}, "Custom profile is empty"},
		"Custom":                               {tlsprofile.Settings{Type: "Custom", Ciphers: []string{"ECDHE-RSA-AES128-SHA"}, MinVersion: "VersionTLS11"}, tls.VersionTLS11, []uint16{cbc}, []uint16{gcm}, ""},
		"Custom with what Go does not have":    {tlsprofile.Settings{Type: "Custom", Ciphers: []string{"DHE-RSA-AES128-GCM-SHA256", "ECDHE-RSA-AES128-SHA"}, MinVersion: "VersionTLS12"}, tls.VersionTLS12, []uint16{cbc}, []uint16{gcm}, "left out: DHE-RSA-AES128-GCM-SHA256"},
		"Custom with only suites of TLS 1.3":   {tlsprofile.Settings{Type: "Custom", Ciphers: []string{"TLS_AES_128_GCM_SHA256"}, MinVersion: "VersionTLS12"}, tls.VersionTLS13, nil, []uint16{gcm}, ""},
		"Custom with only unknown ciphers":     {tlsprofile.Settings{Type: "Custom", Ciphers: []string{"NULL"}, MinVersion: "VersionTLS10"}, tls.VersionTLS13, nil, []uint16{gcm}, "left out: NULL"},
		"Custom with an unknown version":       {tlsprofile.Settings{Type: "Custom", Ciphers: []string{"AES128-SHA"}, MinVersion: "SSL3"}, tls.VersionTLS13, nil, nil, `"SSL3" is not one of`},
		"ciphers go before the profile":        {tlsprofile.Settings{Type: "Old", CiphersOverride: "ECDHE-ECDSA-AES128-GCM-SHA256, TLS_AES_128_GCM_SHA256"}, tls.VersionTLS10, []uint16{gcm}, []uint16{cbc}, ""},
		"ciphers in the words of Go":           {tlsprofile.Settings{CiphersOverride: "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA"}, tls.VersionTLS12, []uint16{cbc}, []uint16{gcm}, ""},
		"the version goes before the profile":  {tlsprofile.Settings{Type: "Modern", MinVersionOverride: "VersionTLS12"}, tls.VersionTLS12, []uint16{gcm}, []uint16{cbc}, ""},
		"an unknown version is the highest":    {tlsprofile.Settings{MinVersionOverride: "1.2"}, tls.VersionTLS13, nil, nil, `"1.2" is not one of`},
		"an override of commas is TLS 1.3":     {tlsprofile.Settings{CiphersOverride: " , "}, tls.VersionTLS13, nil, []uint16{gcm}, ""},
		"Modern with ciphers is still TLS 1.3": {tlsprofile.Settings{Type: "Modern", CiphersOverride: "AES128-SHA"}, tls.VersionTLS13, nil, nil, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p, problems := tt.settings.Profile()
			if p.MinVersion != tt.version {
				t.Errorf("the lowest version is %s, want %s", tls.VersionName(p.MinVersion), tls.VersionName(tt.version))
			}
			for _, suite := range tt.has {
				if !slices.Contains(p.CipherSuites, suite) {
					t.Errorf("%s is not accepted", tls.CipherSuiteName(suite))
				}
			}
			for _, suite := range tt.not {
				if slices.Contains(p.CipherSuites, suite) {
					t.Errorf("%s is accepted", tls.CipherSuiteName(suite))
				}
			}
			if text := strings.Join(problems, "; "); !strings.Contains(text, tt.problem) || (tt.problem == "") != (text == "") {
				t.Errorf("the problems are %q, want %q", text, tt.problem)
			}
		})
	}
}

// What the operator writes into a flag is what the driver reads from it.
func TestSuitesAsAFlag(t *testing.T) {
	for _, kind := range []string{"Old", "Intermediate", "Modern"} {
		p, _ := tlsprofile.Settings{Type: kind}.Profile()
		again, err := tlsprofile.ParseSuites(tlsprofile.SuiteNames(p.CipherSuites))
		if err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		slices.Sort(again)
		slices.Sort(p.CipherSuites)
		if !slices.Equal(again, p.CipherSuites) {
			t.Errorf("%s: %v, want %v", kind, again, p.CipherSuites)
		}
		if version, err := tlsprofile.ParseVersion(tlsprofile.VersionName(p.MinVersion)); err != nil || version != p.MinVersion {
			t.Errorf("%s: the version is %d: %v", kind, version, err)
		}
	}
}

func TestParseSuitesRefusesUnknownNames(t *testing.T) {
	if _, err := tlsprofile.ParseSuites("AES128-SHA,ROT13"); err == nil || !strings.Contains(err.Error(), "ROT13") {
		t.Errorf("the error is %v, want one that names ROT13", err)
	}
}

func TestParseVersion(t *testing.T) {
	for name, want := range map[string]uint16{
		"VersionTLS10": tls.VersionTLS10,
		"VersionTLS11": tls.VersionTLS11,
		"VersionTLS12": tls.VersionTLS12,
		"VersionTLS13": tls.VersionTLS13,
		"VersionTLS14": 0,
		"TLS13":        0,
		"versiontls13": 0,
		"":             0,
	} {
		t.Run(name, func(t *testing.T) {
			got, err := tlsprofile.ParseVersion(name)
			if got != want || (err == nil) != (want != 0) {
				t.Errorf("the version is %x, %v; want %x", got, err, want)
			}
			if err != nil && !strings.Contains(err.Error(), "VersionTLS13") {
				t.Errorf("the error %q does not say what is possible", err)
			}
		})
	}
}
