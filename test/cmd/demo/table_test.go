package main

import (
	"os"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func TestTableIsAligned(t *testing.T) {
	var out strings.Builder
	table := newTable(&out, false)
	table.header()
	table.row("Make a volume", "CreateVolume", good, "pvc, 1.0 GiB", 312*time.Microsecond)
	table.row("Ä step", "statfs", plain, "", 2*time.Second)
	want := []string{
		"step                             call                 answer                                     time",
		"───────────────────────────────  ───────────────────  ───────────────────────────────────  ──────────",
		"Make a volume                    CreateVolume         pvc, 1.0 GiB                            0.31 ms",
		"Ä step                           statfs                                                        2.00 s",
	}
	if got := strings.TrimSuffix(out.String(), "\n"); got != strings.Join(want, "\n") {
		t.Errorf("the table is\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
}

func TestColourCodesHaveNoWidth(t *testing.T) {
	var plainOut, colourOut strings.Builder
	newTable(&plainOut, false).row("a", "b", refused, "c", time.Millisecond)
	newTable(&colourOut, true).row("a", "b", refused, "c", time.Millisecond)
	got := colourOut.String()
	if !strings.Contains(got, "\x1b[33mc\x1b[0m ") {
		t.Errorf("the answer has no colour of its own: %q", got)
	}
	for _, how := range []look{call, refused, dim} {
		got = strings.ReplaceAll(got, "\x1b["+string(how)+"m", "")
	}
	if got = strings.ReplaceAll(got, "\x1b[0m", ""); got != plainOut.String() {
		t.Errorf("without its colours the row is %q, want %q", got, plainOut.String())
	}
}

func TestNoColourInFile(t *testing.T) {
	file, err := os.Create(t.TempDir() + "/output")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if colourful(file) {
		t.Error("a file would get colours")
	}
}

func TestStepsFitTheTable(t *testing.T) {
	for _, step := range steps {
		if utf8.RuneCountInString(step.what) > stepWidth || utf8.RuneCountInString(step.call) > callWidth {
			t.Errorf("too wide: %q, %q", step.what, step.call)
		}
	}
}
