package privilege_test

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
)

var row = regexp.MustCompile("(?m)^\\| `(CAP_[A-Z_]+)` \\|")

func TestWhatIsNeededIsWrittenDown(t *testing.T) {
	text, err := os.ReadFile("../../../docs/security.md")
	must(t, err)
	var written, needed []string
	for _, match := range row.FindAllSubmatch(text, -1) {
		written = append(written, string(match[1]))
	}
	for _, c := range privilege.Needed {
		needed = append(needed, c.String())
	}
	slices.Sort(needed)
	if slices.Sort(written); !slices.Equal(written, needed) {
		t.Errorf("docs/security.md has %q, the driver keeps %q", written, needed)
	}
}
