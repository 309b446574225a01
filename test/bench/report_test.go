package main

import (
	"encoding/json"
	"strings"
	"testing"
)

var example = report{
	Machine: facts{Kernel: "6.1", CPUs: 2, Filesystem: "xfs"},
	Rounds:  7,
	Results: []result{
		{Name: "good", Unit: "IO/s", Ours: 90, Bare: 100, Ratio: 0.9, Noise: 0.01, Budget: 0.7},
		{Name: "not worse than noise", Unit: "MiB/s", Ours: 69, Bare: 100, Ratio: 0.69, Noise: 0.1, Budget: 0.7},
		{Name: "bad", Unit: "IO/s", Ours: 9, Bare: 100, Ratio: 0.09, Noise: 0.01, Budget: 0.7, Exceeded: true},
	},
}

func TestTableShowsEachVerdict(t *testing.T) {
	var out strings.Builder
	if err := example.writeTable(&out); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	for i, want := range []string{
		"Linux 6.1, 2 CPUs, the pool on xfs. Medians of 7 rounds.", "", "ours bare ratio noise budget",
		"good 90 100 IO/s 0.90 ±0.01 ≥ 0.70 kept",
		"not worse than noise 69 100 MiB/s 0.69 ±0.10 ≥ 0.70 within noise",
		"bad 9 100 IO/s 0.09 ±0.01 ≥ 0.70 EXCEEDED",
	} {
		if got := strings.Join(strings.Fields(lines[i]), " "); got != want {
			t.Errorf("line %d is %q, want %q", i+1, got, want)
		}
	}
}

func TestABusyMachineIsTold(t *testing.T) {
	for load, busy := range map[float64]bool{0.5: false, 2: false, 2.5: true} {
		var out strings.Builder
		if err := (report{Machine: facts{CPUs: 2, Load: load}}).writeTable(&out); err != nil {
			t.Fatal(err)
		}
		if told := strings.Contains(out.String(), "busy"); told != busy {
			t.Errorf("that the machine is busy is told: %v, want %v at a load of %g", told, busy, load)
		}
	}
}

func TestJSONHasAllOfIt(t *testing.T) {
	var out strings.Builder
	if err := example.writeJSON(&out); err != nil {
		t.Fatal(err)
	}
	var got report
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil || len(got.Results) != 3 || got.Results[2] != example.Results[2] || got.Machine != example.Machine {
		t.Errorf("read %+v, %v; want %+v", got, err, example)
	}
}

func TestABudgetIsExceededByOneResult(t *testing.T) {
	if !example.exceeded() {
		t.Error("a result that exceeds its budget is not seen")
	}
	if (report{Results: example.Results[:2]}).exceeded() {
		t.Error("noise is taken for a budget exceeded")
	}
}
