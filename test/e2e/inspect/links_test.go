package inspect

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
)

var (
	link    = regexp.MustCompile(`\]\(([^)\s]*)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	unsaid  = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// Each relative link of a document leads to a file, and to a heading if it names one.
func TestDocumentedLinksLead(t *testing.T) {
	const root = "../../.."
	found := 0
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "test/*.md", "test/cmd/*/*.md", "sanity/*.md"} {
		documents := must.Value(filepath.Glob(filepath.Join(root, pattern)))(t)
		for _, document := range documents {
			for _, target := range link.FindAllStringSubmatch(read(t, document), -1) {
				file, anchor, _ := strings.Cut(target[1], "#")
				if strings.Contains(file, "://") {
					continue
				}
				found++
				path := document
				if file != "" {
					path = filepath.Join(filepath.Dir(document), file)
				}
				if _, err := os.Stat(path); err != nil {
					t.Errorf("%s: %s leads nowhere", document, target[1])
				} else if anchor != "" && !anchors(read(t, path))[anchor] {
					t.Errorf("%s: %s has no such heading", document, target[1])
				}
			}
		}
	}
	if found < 200 {
		t.Errorf("only %d links are found", found)
	}
}

// anchors are those that GitHub gives the headings of a document.
func anchors(text string) map[string]bool {
	all := make(map[string]bool)
	for _, h := range heading.FindAllStringSubmatch(text, -1) {
		words := unsaid.ReplaceAllString(strings.ToLower(strings.TrimSpace(h[1])), "")
		all[strings.ReplaceAll(words, " ", "-")] = true
	}
	return all
}

func read(t *testing.T, path string) string {
	t.Helper()
	text := must.Value(os.ReadFile(path))(t)
	return string(text)
}
