// Package example has the examples of the documents that the tests of the cluster type.
package example

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// An Example is the only indented block of a document that has these words.
type Example struct{ document, words string }

// All that are typed.
var (
	PodAndClaim  = Example{"cluster.md", "deploy/csi/example/pod.yaml"}
	WriteAndGrow = Example{"cluster.md", "kubectl patch pvc"}
	FreezeClass  = Example{"snapshots.md", "name: hostpath-csi-freeze"}
)

// Lines are those of the example, without their indent. The working directory is that of a package two directories
// below test.
func (e Example) Lines(t testing.TB) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../../docs", e.document))
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, block := range regexp.MustCompile(`(?m)(^    .*\n)+`).FindAllString(string(text), -1) {
		if strings.Contains(block, e.words) {
			found = append(found, block)
		}
	}
	if len(found) != 1 {
		t.Fatalf("want one example with %q in docs/%s, there are %q", e.words, e.document, found)
	}
	lines := strings.Split(strings.TrimSuffix(found[0], "\n"), "\n")
	for i := range lines {
		lines[i] = lines[i][len("    "):]
	}
	return lines
}
