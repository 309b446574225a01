package privilege_test

import (
	"bytes"
	"os"
	"regexp"
	"slices"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/test/must"
)

var row = regexp.MustCompile("(?m)^\\| `?(CAP_[A-Z_]+)`? \\|")

func TestDocsListNeededCapabilities(t *testing.T) {
	text, err := os.ReadFile("../../../docs/security.md")
	must.Succeed(t, err)
	// Further below are those of other programs.
	_, text, _ = bytes.Cut(text, []byte("\n## Capabilities\n"))
	text, _, _ = bytes.Cut(text, []byte("\n## "))
	wantRows(t, text, privilege.Needed)
}

func TestDocsListCapabilitiesOfMounter(t *testing.T) {
	text, err := os.ReadFile("../../../docs/pools.md")
	must.Succeed(t, err)
	wantRows(t, text, privilege.ForMounter)
}

// wantRows says that the tables of a text have a row for each capability, and no other.
func wantRows(t *testing.T, text []byte, wanted []privilege.Capability) {
	t.Helper()
	var written, needed []string
	for _, match := range row.FindAllSubmatch(text, -1) {
		written = append(written, string(match[1]))
	}
	for _, c := range wanted {
		needed = append(needed, c.String())
	}
	slices.Sort(needed)
	if slices.Sort(written); !slices.Equal(written, needed) {
		t.Errorf("the document lists %q, the program keeps %q", written, needed)
	}
}
