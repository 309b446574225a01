package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var example = report{
	Machine: facts{Kernel: "6.1", CPUs: 2, Filesystem: "xfs", Quotas: true},
	Rounds:  7,
	Results: []result{
		{Group: "Calls", Name: "good", Unit: micros, Ours: 90, Limit: "an empty call", Bare: 60, Ratio: 1.5, Noise: 0.01, Budget: budget{AtMost: 2}},
		{Group: "Calls", Name: "slow", Unit: micros, Ours: 45_600, Limit: "a fast one", Bare: 20_000, Ratio: 2.28, Noise: 0.5, Budget: budget{AtMost: 2}},
		{Group: "IO", Name: "bad", Unit: "IO/s", Ours: 9, Limit: "its file", Bare: 100, Ratio: 0.09, Noise: 0.01, Budget: budget{AtLeast: 0.7}, Exceeded: true},
		{Group: "Size", Name: "start", Unit: micros, Ours: 1_500_000, Limit: "reading", Bare: 300_000, Ratio: 5, Noise: 2000, Budget: budget{Max: 2e6}},
		{Group: "Size", Name: "the program", Unit: megabytes, Ours: 14.25, Budget: budget{}},
	},
}

func TestTableShowsEachVerdict(t *testing.T) {
	wantLines(t, report.writeTable, []string{
		"Linux 6.1, 2 CPUs, the pool on xfs with quotas. Medians of 7 rounds.", "", "ours limit ratio noise budget the limit",
		"good 90.0 µs 60.0 µs 1.50 ±0.01 ≤ 2.00 kept an empty call",
		"slow 45.6 ms 20.0 ms 2.28 ±0.50 ≤ 2.00 within noise a fast one",
		"bad 9.00 IO/s 100 IO/s 0.09 ±0.01 ≥ 0.70 EXCEEDED its file",
		"start 1.50 s 300 ms 5.00 ±2000 µs ≤ 2.00 s kept reading",
		"the program 14.2 MB ±0",
	})
}

func TestMarkdownTablePerGroup(t *testing.T) {
	wantLines(t, report.writeMarkdown, []string{
		"Linux 6.1, 2 CPUs, the pool on xfs with quotas. Medians of 7 rounds.", "",
		"### Calls", "", "| | driver | limit | | ratio | noise | budget | |", "|---|--:|--:|---|--:|--:|--:|---|",
		"| good | 90.0 µs | 60.0 µs | an empty call | 1.50 | ±0.01 | ≤ 2.00 | kept |",
		"| slow | 45.6 ms | 20.0 ms | a fast one | 2.28 | ±0.50 | ≤ 2.00 | within noise |",
		"", "### IO", "", "| | driver | limit | | ratio | noise | budget | |", "|---|--:|--:|---|--:|--:|--:|---|",
		"| bad | 9.00 IO/s | 100 IO/s | its file | 0.09 | ±0.01 | ≥ 0.70 | EXCEEDED |",
		"", "### Size", "", "| | driver | limit | | ratio | noise | budget | |", "|---|--:|--:|---|--:|--:|--:|---|",
		"| start | 1.50 s | 300 ms | reading | 5.00 | ±2000 µs | ≤ 2.00 s | kept |",
		"| the program | 14.2 MB | | | | ±0 | | |",
	})
}

// wantLines compares what is written, but for how it is aligned.
func wantLines(t *testing.T, write format, want []string) {
	t.Helper()
	var out strings.Builder
	if err := write(example, &out); err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(strings.TrimSpace(out.String())) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("it writes (-want +got)\n%s", diff)
	}
}

func TestBusyMachineIsReported(t *testing.T) {
	for load, busy := range map[float64]bool{0.5: false, 2: false, 2.5: true} {
		var out strings.Builder
		if err := (report{Machine: facts{CPUs: 2, Load: load}}).writeTable(&out); err != nil {
			t.Fatal(err)
		}
		if reported := strings.Contains(out.String(), "busy"); reported != busy {
			t.Errorf("that the machine is busy is reported: %v, want %v at a load of %g", reported, busy, load)
		}
	}
}

func TestJSON(t *testing.T) {
	var out strings.Builder
	if err := example.writeJSON(&out); err != nil {
		t.Fatal(err)
	}
	var got report
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil || !slices.Equal(got.Results, example.Results) || got.Machine != example.Machine {
		t.Errorf("read %+v, %v; want %+v", got, err, example)
	}
}

func TestOneResultExceedsBudget(t *testing.T) {
	if !example.exceeded() {
		t.Error("a result that exceeds its budget is not seen")
	}
	if (report{Results: example.Results[:2]}).exceeded() {
		t.Error("noise is taken for a budget exceeded")
	}
}
