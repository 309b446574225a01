package inspect

import (
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// What the documents quote “so” is in the programs. An ellipsis stands for names and numbers.
func TestDocumentedMessagesExist(t *testing.T) {
	runbooks, err := filepath.Glob("../../../docs/runbooks/*.md")
	must.Succeed(t, err)
	documents, err := filepath.Glob("../../../docs/*.md")
	must.Succeed(t, err)
	said := literals(t, "../../../pkg", "../../../cmd")
	found := 0
	for _, document := range append(documents, runbooks...) {
		text := must.Value(os.ReadFile(document))(t)
		quotes := regexp.MustCompile(`“([^”]+)”`).FindAllStringSubmatch(strings.Join(strings.Fields(string(text)), " "), -1)
		found += len(quotes)
		for _, quote := range quotes {
			for piece := range strings.SplitSeq(quote[1], "…") {
				if piece = strings.Trim(piece, " ,"); piece != "" && !strings.Contains(said, piece) {
					t.Errorf("%s: no program has the message %q of %q", filepath.Base(document), piece, quote[1])
				}
			}
		}
	}
	if found < 60 {
		t.Errorf("only %d quotations are found", found)
	}
}

// literals are all texts of the program's source. Where two are joined, they are here.
func literals(t *testing.T, roots ...string) string {
	t.Helper()
	var all strings.Builder
	for _, root := range roots {
		must.Succeed(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
				return err
			}
			source, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			files := token.NewFileSet()
			var s scanner.Scanner
			s.Init(files.AddFile(path, files.Base(), len(source)), source, nil, 0)
			joined := false
			for {
				_, kind, literal := s.Scan()
				switch kind {
				case token.EOF:
					return nil
				case token.ADD:
					joined = true
					continue
				case token.STRING:
					if !joined {
						all.WriteString("\n")
					}
					text, err := strconv.Unquote(literal)
					if err != nil {
						return err
					}
					all.WriteString(text)
				}
				joined = false
			}
		}))
	}
	return all.String()
}
