package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
)

// An action is something that is done for a measurement.
type action func()

// A row is a figure of the driver and its limit, in the same unit.
type row struct {
	name   string
	unit   string
	budget budget
	// samples is how often each is measured in a round, in turns; 0 stands for once.
	// Their median is what the round has.
	samples     int
	ours, limit func() float64 // no limit is nil
}

// A budget bounds what a figure may be. The zero budget allows everything. atMost and atLeast bound the ratio of ours to the limit; max
// bounds ours itself, in its unit.
type budget struct{ atMost, atLeast, max float64 }

// over is by how much a ratio, or a figure, is worse than the budget; not above 0 if it
// is kept.
func (b budget) over(ratio, ours float64) float64 {
	switch {
	case b.atMost > 0:
		return ratio - b.atMost
	case b.atLeast > 0:
		return b.atLeast - ratio
	case b.max > 0:
		return ours - b.max
	}
	return 0
}

// A result is what a row has come to. Ours, limit and ratio are medians of the rounds; noise is the median of how far the ratio, or ours if
// there is none or the budget is about it, was from its median. Exceeded: it is worse than the budget by more than twice the noise, or by
// more than a fifth.
type result struct {
	row
	ours, limit, ratio, noise float64
	exceeded                  bool
}

// compare measures everything in each round, ours and the limit next to each other and in
// turn first, so that what else the machine does slows both.
func compare(rows []row, rounds int) []result {
	measured := make([][2][]float64, len(rows))
	for round := range rounds {
		for at, r := range rows {
			var samples [2][]float64
			for i := range max(1, r.samples) {
				first := (i + round) % 2
				for _, side := range [2]int{first, 1 - first} {
					if measure := [2]func() float64{r.ours, r.limit}[side]; measure != nil {
						value := measure()
						if value <= 0 {
							check(fmt.Errorf("%s: measured %g %s, want more than nothing", r.name, value, r.unit))
						}
						samples[side] = append(samples[side], value)
					}
				}
			}
			for side := range samples {
				measured[at][side] = append(measured[at][side], median(samples[side]))
			}
		}
	}
	var results []result
	for at, r := range rows {
		results = append(results, r.judge(measured[at][0], measured[at][1]))
	}
	return results
}

// judge pairs what was measured in the same round.
func (r row) judge(ours, limit []float64) result {
	is := result{row: r, ours: median(ours), limit: median(limit)}
	noisy := ours
	if r.limit != nil {
		var ratios []float64
		for i := range ours {
			ratios = append(ratios, ours[i]/limit[i])
		}
		is.ratio = median(ratios)
		if r.budget.max == 0 {
			noisy = ratios
		}
	}
	var off []float64
	for _, value := range noisy {
		off = append(off, math.Abs(value-median(noisy)))
	}
	is.noise = median(off)
	fifth := cmp.Or(r.budget.atMost, r.budget.atLeast, r.budget.max) / 5
	is.exceeded = r.budget.over(is.ratio, is.ours) > min(2*is.noise, fifth)
	return is
}

// median is 0 of nothing.
func median(of []float64) float64 {
	if len(of) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(of))
	half := len(sorted) / 2
	return (sorted[half] + sorted[(len(sorted)-1)/2]) / 2
}

// timed measures how long do takes, in microseconds. What is done before and after does not count.
func timed(before, do, after action) func() float64 {
	return func() float64 {
		before()
		began := time.Now()
		do()
		took := time.Since(began)
		after()
		return micro(took)
	}
}

func micro(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// nothing is what is done where nothing is to be done.
func nothing() {}

// inOrder is one thing after another.
func inOrder(actions ...action) action {
	return func() {
		for _, do := range actions {
			do()
		}
	}
}

// A pair is a call and the one that undoes it. Rest waits for what the latter left to be done.
type pair struct{ do, undo, rest action }

// both are the rows of the calls of a pair, compared with those of another.
func both(how string, samples int, ours, limit pair, do, undo row) []row {
	do.name, undo.name, do.unit, undo.unit, do.samples, undo.samples = do.name+how, undo.name+how, micros, micros, samples, samples
	do.ours, do.limit = timed(nothing, ours.do, inOrder(ours.undo, ours.rest)), timed(nothing, limit.do, inOrder(limit.undo, limit.rest))
	undo.ours, undo.limit = timed(ours.do, ours.undo, ours.rest), timed(limit.do, limit.undo, limit.rest)
	return []row{do, undo}
}

// Times are printed in units that people read easily, whatever they were measured in.
const micros = "µs"

// String is the row of a result.
func (r result) String() string {
	ratio, noise, allowed, verdict := "", r.figure(r.noise), "", ""
	if r.ratio > 0 {
		ratio = fmt.Sprintf("%.2f", r.ratio)
		if r.budget.max == 0 {
			noise = fmt.Sprintf("%.2f", r.noise)
		}
	}
	switch b := r.budget; {
	case b.atMost > 0:
		allowed = fmt.Sprintf("≤ %.2f", b.atMost)
	case b.atLeast > 0:
		allowed = fmt.Sprintf("≥ %.2f", b.atLeast)
	case b.max > 0:
		allowed = "≤ " + r.figure(b.max)
	}
	switch {
	case r.exceeded:
		verdict = "EXCEEDED"
	case r.budget.over(r.ratio, r.ours) > 0:
		verdict = "within noise"
	}
	return fmt.Sprintf("| %s | %s | %s | %s | ±%s | %s | %s |\n", r.name, r.figure(r.ours), r.figure(r.limit), ratio, noise, allowed, verdict)
}

// figure is a figure with its unit; nothing where there is none. It shows three digits, and all of what is in front of the point.
func (r result) figure(value float64) string {
	unit := r.unit
	switch {
	case value == 0:
		return ""
	case unit == micros && value >= 1e6:
		value, unit = value/1e6, "s"
	case unit == micros && value >= 1e4:
		value, unit = value/1e3, "ms"
	}
	decimals := 0
	for limit := 100.0; decimals < 2 && value < limit; limit /= 10 {
		decimals++
	}
	return strconv.FormatFloat(value, 'f', decimals, 64) + " " + unit
}

// thousands writes a number as people read it.
func thousands(n int) string {
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}
