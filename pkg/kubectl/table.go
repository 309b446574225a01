package kubectl

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode"
)

// A Row is a line of a table, and an object of a document.
type Row interface{ cells() []string }

// WriteTable writes rows below their headings. No width of a terminal is assumed: what can be long is last in a row.
func WriteTable[R Row](w io.Writer, headings []string, rows []R) error {
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, strings.Join(headings, "\t"))
	for _, r := range rows {
		cells := r.cells()
		for i := range cells {
			cells[i] = printable(cells[i])
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	return table.Flush()
}

// printable keeps what a node reports from moving the cursor, and from being taken for other cells.
func printable(text string) string {
	if text == "" {
		return "-"
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, text)
}

// size is a number of bytes for people, rounded to a tenth; a dash for one that is not known.
func size(bytes *int64) string {
	if bytes == nil {
		return "-"
	}
	value, unit := float64(*bytes), "B"
	for _, next := range []string{"KiB", "MiB", "GiB", "TiB", "PiB"} {
		if value < 1024 {
			break
		}
		value, unit = value/1024, next
	}
	if unit == "B" {
		return strconv.FormatInt(*bytes, 10) + " B"
	}
	return strconv.FormatFloat(value, 'f', 1, 64) + " " + unit
}

func count(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}

const inOrder = "in order"

func condition(abnormal bool, text string) string {
	switch {
	case abnormal:
		return "ABNORMAL: " + text
	case text == "":
		return inOrder
	}
	return text
}
