package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// A unit is what a figure is counted in.
type unit string

// Times are printed in units that people read easily, whatever they were measured in.
const (
	micros     unit = "µs"
	mebibytes  unit = "MiB"
	megabytes  unit = "MB"
	eachSecond unit = "/s"
)

// A report is all that is known in the end.
type report struct {
	Machine facts    `json:"machine"`
	Rounds  int      `json:"rounds"`
	Results []result `json:"results"`
	// Missing is what could not be measured, and why.
	Missing []string `json:"missing,omitempty"`
}

// facts are what figures depend on.
type facts struct {
	Kernel string `json:"kernel"`
	CPUs   int    `json:"cpus"`
	// Filesystem is the kind that the pool is on.
	Filesystem string `json:"filesystem"`
	// Quotas reports whether it enforces the sizes of volumes.
	Quotas bool `json:"quotas"`
	// Load is how many programs wanted a CPU in the minute before.
	Load float64 `json:"load"`
}

// busy reports whether others want the CPUs, and that ratios suffer: more threads work for
// each request to a device than for one to a file, and each has to wait for its turn.
func (f facts) busy() bool { return f.Load > float64(f.CPUs) }

func (f facts) String() string {
	quotas := "without quotas"
	if f.Quotas {
		quotas = "with quotas"
	}
	return fmt.Sprintf("Linux %s, %d CPUs, the pool on %s %s", f.Kernel, f.CPUs, f.Filesystem, quotas)
}

func machine(path string) facts {
	m := facts{CPUs: runtime.NumCPU(), Filesystem: "unknown", Quotas: keepsSizes(path)}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	var fs unix.Statfs_t
	if unix.Statfs(path, &fs) == nil {
		if kind, ok := kinds[fs.Type]; ok {
			m.Filesystem = kind
		}
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		_, _ = fmt.Sscan(string(text), &m.Load) // 0 if it cannot be read
	}
	return m
}

func keepsSizes(path string) bool {
	d, err := dir.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = d.Close() }() // opened for reading
	_, err = quota.Detect(d)
	return err == nil
}

var kinds = map[int64]string{
	unix.XFS_SUPER_MAGIC:   "xfs",
	unix.EXT4_SUPER_MAGIC:  "ext4",
	unix.BTRFS_SUPER_MAGIC: "btrfs",
	unix.TMPFS_MAGIC:       "tmpfs",
}

func (r report) exceeded() bool {
	return slices.ContainsFunc(r.Results, func(r result) bool { return r.Exceeded })
}

// A format writes a report.
type format func(r report, out io.Writer) error

var formats = map[string]format{
	"table":    report.writeTable,
	"json":     report.writeJSON,
	"markdown": report.writeMarkdown,
}

func (r report) writeJSON(out io.Writer) error {
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	return encoder.Encode(r)
}

func (r report) writeTable(out io.Writer) error {
	fmt.Fprintf(out, "\n%s. Medians of %d rounds.\n\n", r.Machine, r.Rounds)
	if r.Machine.busy() {
		fmt.Fprintf(out, "The machine was busy before, with a load of %.1f: expect worse ratios, and try again.\n\n", r.Machine.Load)
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	// What comes after the last tab is not aligned.
	fmt.Fprintln(table, strings.Join([]string{"", "ours", "limit", "ratio", "noise", "budget", "", "  the limit"}, "\t"))
	for _, r := range r.Results {
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t±%s\t%s\t%s\t%s\n",
			r.Name, r.figure(r.Ours), r.figure(r.Bare), ratio(r.Ratio), r.noise(), r.Budget.figure(r.Unit), r.verdict(), apart(r.Limit))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, missing := range r.Missing {
		fmt.Fprintf(out, "\nNot measured: %s\n", missing)
	}
	return nil
}

// writeMarkdown makes what docs/performance.md has: a table for each group.
func (r report) writeMarkdown(out io.Writer) error {
	fmt.Fprintf(out, "%s. Medians of %d rounds.\n", r.Machine, r.Rounds)
	group := ""
	for _, r := range r.Results {
		if r.Group != group {
			group = r.Group
			fmt.Fprintf(out, "\n### %s\n\n| | driver | limit | | ratio | noise | budget | |\n|---|--:|--:|---|--:|--:|--:|---|\n", group)
		}
		fmt.Fprintf(out, "| %s | %s | %s | %s | %s | ±%s | %s | %s |\n",
			r.Name, r.figure(r.Ours), r.figure(r.Bare), r.Limit, ratio(r.Ratio), r.noise(), r.Budget.figure(r.Unit), r.verdict())
	}
	for _, missing := range r.Missing {
		fmt.Fprintf(out, "\nNot measured: %s\n", missing)
	}
	return nil
}

// apart sets something off from what is before it.
func apart(text string) string {
	if text == "" {
		return ""
	}
	return "  " + text
}

// figure is a figure with its unit; nothing where there is none.
func (r result) figure(value float64) string {
	switch {
	case value == 0:
		return ""
	case r.Unit == micros && value >= 1e6:
		return digits(value/1e6) + " s"
	case r.Unit == micros && value >= 1e4:
		return digits(value/1e3) + " ms"
	}
	return digits(value) + " " + string(r.Unit)
}

// digits shows three of them, and all of what is in front of the point.
func digits(value float64) string {
	decimals := 0
	for limit := 100.0; decimals < 2 && value < limit; limit /= 10 {
		decimals++
	}
	return strconv.FormatFloat(value, 'f', decimals, 64)
}

func ratio(value float64) string {
	if value == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f", value)
}

// noise is in what the budget is in.
func (r result) noise() string {
	if r.Budget.Max > 0 || r.Ratio == 0 {
		if r.Noise == 0 {
			return "0"
		}
		return r.figure(r.Noise)
	}
	return fmt.Sprintf("%.2f", r.Noise)
}

func (b budget) figure(u unit) string {
	switch {
	case b.AtMost > 0:
		return fmt.Sprintf("≤ %.2f", b.AtMost)
	case b.AtLeast > 0:
		return fmt.Sprintf("≥ %.2f", b.AtLeast)
	case b.Max > 0:
		return "≤ " + result{Unit: u}.figure(b.Max)
	}
	return ""
}

func (r result) verdict() string {
	switch {
	case r.Budget == budget{}:
		return ""
	case r.Exceeded:
		return "EXCEEDED"
	case r.Budget.over(r.Ratio, r.Ours) > 0:
		return "within noise"
	}
	return "kept"
}
