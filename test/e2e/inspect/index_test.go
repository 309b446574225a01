package inspect

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// Each directory of test/ has its line in the index, and each line a directory.
func TestIndexOfTestsIsComplete(t *testing.T) {
	const root = "../.."
	var want []string
	for _, pattern := range []string{"*", "cmd/*", "e2e/*", "testenv/*"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		must.Succeed(t, err)
		for _, path := range found {
			name, err := filepath.Rel(root, path)
			must.Succeed(t, err)
			if info, err := os.Stat(path); err == nil && info.IsDir() && name != "cmd" && name != "e2e" {
				want = append(want, name)
			}
		}
	}
	index, err := os.ReadFile(filepath.Join(root, "README.md"))
	must.Succeed(t, err)
	var got []string
	for _, line := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(string(index), -1) {
		got = append(got, line[1])
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("test/README.md (-directories +index):\n%s", diff)
	}
}
