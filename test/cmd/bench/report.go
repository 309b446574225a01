package main

import (
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
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

// machine is what figures depend on.
func machine(o order) string {
	kernel, on := "unknown", o.kind
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		kernel = unix.ByteSliceToString(name.Release[:])
	}
	if on == "" {
		on = "the filesystem of " + o.dir
	}
	text := fmt.Sprintf("Linux %s, %d CPUs, the pools on %s.", kernel, runtime.NumCPU(), on)
	var load float64
	if now, err := os.ReadFile("/proc/loadavg"); err == nil {
		_, _ = fmt.Sscan(string(now), &load) // 0 if it cannot be read
	}
	if load > float64(runtime.NumCPU()) {
		text += fmt.Sprintf(" The machine was busy before, with a load of %.1f: expect worse ratios, and try again.", load)
	}
	return text
}

// The table is that of docs/performance.md.
const heading = `| | driver | limit | ratio | noise | budget | |
|---|--:|--:|--:|--:|--:|---|
`

// String is the row of a result.
func (r result) String() string {
	ratio, noise := "", r.figure(r.noise)
	if r.ratio > 0 {
		ratio = fmt.Sprintf("%.2f", r.ratio)
		if r.budget.max == 0 {
			noise = fmt.Sprintf("%.2f", r.noise)
		}
	}
	allowed, verdict := r.allowed(), ""
	switch {
	case r.exceeded:
		verdict = "EXCEEDED"
	case r.budget.over(r.ratio, r.ours) > 0:
		verdict = "within noise"
	}
	return fmt.Sprintf("| %s | %s | %s | %s | ±%s | %s | %s |\n", r.name, r.figure(r.ours), r.figure(r.limit), ratio, noise, allowed, verdict)
}

func (r result) allowed() string {
	switch b := r.budget; {
	case b.atMost > 0:
		return fmt.Sprintf("≤ %.2f", b.atMost)
	case b.atLeast > 0:
		return fmt.Sprintf("≥ %.2f", b.atLeast)
	case b.max > 0:
		return "≤ " + r.figure(b.max)
	}
	return ""
}

// figure is a figure with its unit; nothing where there is none.
func (r result) figure(value float64) string {
	switch {
	case value == 0:
		return ""
	case r.unit == micros && value >= 1e6:
		return digits(value/1e6) + " s"
	case r.unit == micros && value >= 1e4:
		return digits(value/1e3) + " ms"
	}
	return digits(value) + " " + string(r.unit)
}

// digits shows three of them, and all of what is in front of the point.
func digits(value float64) string {
	decimals := 0
	for limit := 100.0; decimals < 2 && value < limit; limit /= 10 {
		decimals++
	}
	return strconv.FormatFloat(value, 'f', decimals, 64)
}

// thousands writes a number as people read it.
func thousands(n int) string {
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}
