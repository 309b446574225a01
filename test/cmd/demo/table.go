package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode/utf8"
)

// A table writes steps as they happen, so its columns' widths are given.
type table struct {
	out     io.Writer
	colours bool
}

const (
	stepWidth   = 31
	callWidth   = 19
	answerWidth = 35
	timeWidth   = 10
)

// A look is how a cell is shown on a terminal.
type look string

const (
	plain   look = ""
	bold    look = "1"
	dim     look = "2"
	bad     look = "1;31"
	good    look = "32"
	refused look = "33"
	call    look = "36"
)

func newTable(out io.Writer, colours bool) *table { return &table{out: out, colours: colours} }

// colourful reports whether a file is a terminal whose user has nothing against
// colours; see https://no-color.org.
func colourful(file *os.File) bool {
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0 &&
		os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// note writes a line outside the table.
func (t *table) note(line string) { fmt.Fprintln(t.out, line) }

func (t *table) header() {
	t.write(
		t.cell(bold, "step", stepWidth), t.cell(bold, "call", callWidth),
		t.cell(bold, "answer", answerWidth), t.right(bold, "time", timeWidth))
	t.write(
		t.cell(dim, strings.Repeat("─", stepWidth), 0), t.cell(dim, strings.Repeat("─", callWidth), 0),
		t.cell(dim, strings.Repeat("─", answerWidth), 0), t.cell(dim, strings.Repeat("─", timeWidth), 0))
}

// row writes a step. A look other than plain shows what kind of answer it was.
func (t *table) row(what, calling string, kind look, answer string, took time.Duration) {
	t.write(
		t.cell(plain, what, stepWidth), t.cell(call, calling, callWidth),
		t.cell(kind, answer, answerWidth), t.right(dim, milliseconds(took), timeWidth))
}

func (t *table) write(cells ...string) {
	fmt.Fprintln(t.out, strings.TrimRight(strings.Join(cells, "  "), " "))
}

// cell pads a text on its right. Colours come last, as they have no width.
func (t *table) cell(how look, text string, width int) string {
	return t.paint(how, text) + padding(text, width)
}

func (t *table) right(how look, text string, width int) string {
	return padding(text, width) + t.paint(how, text)
}

func padding(text string, width int) string {
	return strings.Repeat(" ", max(0, width-utf8.RuneCountInString(text)))
}

func (t *table) paint(how look, text string) string {
	if !t.colours || how == plain || text == "" {
		return text
	}
	return "\x1b[" + string(how) + "m" + text + "\x1b[0m"
}
