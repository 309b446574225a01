package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestTry(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want int
		says string
	}{
		"a directory":        {[]string{t.TempDir()}, healthy, " and read it back\n"},
		"none that is there": {[]string{filepath.Join(t.TempDir(), "none")}, failed, "no such file or directory"},
		"no argument":        {nil, failed, "one directory"},
		"more than one":      {[]string{t.TempDir(), "more"}, failed, "one directory"},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			if status := runTry(c.args, &out, &out); status != c.want || !strings.Contains(out.String(), c.says) {
				t.Errorf("%d, %s, want %d and %q", status, out.String(), c.want, c.says)
			}
		})
	}
}

// A file of that name is not the one that was written.
func TestTryKeepsWhatIsThere(t *testing.T) {
	path := t.TempDir()
	var out strings.Builder
	for _, want := range []int{healthy, failed} {
		if status := runTry([]string{path}, &out, &out); status != want {
			t.Errorf("%d, %s, want %d", status, out.String(), want)
		}
		must.Succeed(t, os.WriteFile(filepath.Join(path, tried), []byte("a user's"), 0o600))
	}
	kept, err := os.ReadFile(filepath.Join(path, tried))
	if string(kept) != "a user's" {
		t.Errorf("the file is %q, %v", kept, err)
	}
}
