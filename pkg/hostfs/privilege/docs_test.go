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

var row = regexp.MustCompile("(?m)^\\| `(CAP_[A-Z_]+)` \\|")

func TestDocsListNeededCapabilities(t *testing.T) {
	text, err := os.ReadFile("../../../docs/security.md")
	must.Succeed(t, err)
	// Further below are those of other programs.
	_, text, _ = bytes.Cut(text, []byte("\n## Capabilities\n"))
	text, _, _ = bytes.Cut(text, []byte("\n## "))
	var written, needed []string
	for _, match := range row.FindAllSubmatch(text, -1) {
		written = append(written, string(match[1]))
	}
	for _, c := range privilege.Needed {
		needed = append(needed, c.String())
	}
	slices.Sort(needed)
	if slices.Sort(written); !slices.Equal(written, needed) {
		t.Errorf("docs/security.md lists %q, the driver keeps %q", written, needed)
	}
}
