package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"
)

// A report is all that is known in the end.
type report struct {
	Machine facts    `json:"machine"`
	Rounds  int      `json:"rounds"`
	Results []result `json:"results"`
}

// facts are what figures depend on.
type facts struct {
	Kernel string `json:"kernel"`
	CPUs   int    `json:"cpus"`
	// Filesystem is the kind that the pool is on.
	Filesystem string `json:"filesystem"`
	// Load is how many programs wanted a CPU in the minute before.
	Load float64 `json:"load"`
}

// busy tells that others want the CPUs, and that ratios suffer: more threads work for
// each request to a device than for one to a file, and each has to wait for its turn.
func (f facts) busy() bool { return f.Load > float64(f.CPUs) }

func machine(dir string) facts {
	m := facts{CPUs: runtime.NumCPU(), Filesystem: "unknown"}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	var fs unix.Statfs_t
	if unix.Statfs(dir, &fs) == nil {
		if kind, ok := kinds[fs.Type]; ok {
			m.Filesystem = kind
		}
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		_, _ = fmt.Sscan(string(text), &m.Load) // 0 if it cannot be read
	}
	return m
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

func (r report) writeJSON(out io.Writer) error {
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	return encoder.Encode(r)
}

func (r report) writeTable(out io.Writer) error {
	fmt.Fprintf(out, "\nLinux %s, %d CPUs, the pool on %s. Medians of %d rounds.\n\n", r.Machine.Kernel, r.Machine.CPUs, r.Machine.Filesystem, r.Rounds)
	if r.Machine.busy() {
		fmt.Fprintf(out, "The machine was busy before, with a load of %.1f: expect worse ratios, and try again.\n\n", r.Machine.Load)
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	header := []string{"", "ours", "bare", "", "ratio", "noise", "budget", "", ""}
	fmt.Fprintln(table, strings.Join(header, "\t"))
	for _, r := range r.Results {
		verdict := "kept"
		switch {
		case r.Exceeded:
			verdict = "EXCEEDED"
		case r.Ratio < r.Budget:
			verdict = "within noise"
		}
		fmt.Fprintf(table, "%s\t%.0f\t%.0f\t%s\t%.2f\t±%.2f\t≥ %.2f\t%s\t\n", r.Name, r.Ours, r.Bare, r.Unit, r.Ratio, r.Noise, r.Budget, verdict)
	}
	return table.Flush()
}
