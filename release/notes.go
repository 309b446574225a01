package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const (
	notesName = "RELEASE_NOTES.md"
	sumsName  = "SHA256SUMS"
)

// writeNotes takes them out of the changelog.
func (r release) writeNotes() error {
	changelog, err := os.ReadFile(filepath.Join(r.root, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	notes, err := r.notesOf(string(changelog))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, notesName), []byte(notes), 0o644)
}

// notesOf is the section of the version, or what is not released where there is none (Keep a Changelog 1.1.0). Links into the repository
// lead to that version there.
func (r release) notesOf(changelog string) (string, error) {
	for _, heading := range []string{"## [" + r.chartVersion() + "]", "## [Unreleased]"} {
		_, section, ok := strings.Cut(changelog, heading)
		if !ok {
			continue
		}
		_, section, _ = strings.Cut(section, "\n") // the date
		section, _, _ = strings.Cut(section, "\n## ")
		var kept []string
		for line := range strings.Lines(section) {
			if !strings.HasPrefix(line, "[") { // what links mean, after the last section
				kept = append(kept, line)
			}
		}
		section = strings.TrimSpace(strings.Join(kept, ""))
		if section == "" {
			return "", fmt.Errorf("CHANGELOG.md says nothing below %q", heading)
		}
		return strings.ReplaceAll(section, "](docs/", "]("+r.repository+"/blob/"+r.version+"/docs/") + "\n", nil
	}
	return "", errors.New("CHANGELOG.md has no section for the version, and none that is not released")
}

// writeSums is read by sha256sum --check.
func (r release) writeSums() error {
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var sums strings.Builder
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(r.out, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(data), e.Name())
	}
	return os.WriteFile(filepath.Join(r.out, sumsName), []byte(sums.String()), 0o644)
}
