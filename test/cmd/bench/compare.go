package main

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"
)

// An action is something that is done for a measurement.
type action func(ctx context.Context) error

// A measureFunc measures once.
type measureFunc func(ctx context.Context) (float64, error)

// A comparison is a figure of the driver and its limit, in the same unit.
type comparison struct {
	name string
	unit unit
	// samples is how often each is measured in a round, in turns; 0 stands for once.
	// Their median is what the round has.
	samples int
	budget  budget
	ours    measureFunc
	limit   measureFunc // nil where there is none
}

// A budget bounds what a figure may be. The zero budget allows everything.
type budget struct {
	// atMost and atLeast bound the ratio of ours to the limit; max bounds ours itself, in its unit.
	atMost, atLeast, max float64
}

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

// A result is what a comparison has come to.
type result struct {
	name string
	unit unit
	// ours and limit are medians over the rounds.
	ours, limit float64
	// ratio is the median of the rounds' ratios of ours to the limit; 0 without a limit.
	ratio float64
	// noise is the median of how far the ratio, or ours if there is none or the budget is
	// about it, was from its median.
	noise  float64
	budget budget
	// exceeded: it is worse than the budget by more than twice the noise, or by more than a fifth.
	exceeded bool
}

// compare measures everything in each round, ours and the limit next to each other and in
// turn first, so that what else the machine does slows both.
func compare(ctx context.Context, comparisons []comparison, rounds int) ([]result, error) {
	ours, limit := make([][]float64, len(comparisons)), make([][]float64, len(comparisons))
	for round := range rounds {
		for i, c := range comparisons {
			one, other, err := c.measure(ctx, round)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.name, err)
			}
			ours[i], limit[i] = append(ours[i], one), append(limit[i], other)
		}
	}
	var results []result
	for i, c := range comparisons {
		results = append(results, c.judge(ours[i], limit[i]))
	}
	return results, nil
}

// measure is one round: the medians of the samples.
func (c comparison) measure(ctx context.Context, round int) (ours, limit float64, err error) {
	var all [2][]float64
	sides := [2]measureFunc{c.ours, c.limit}
	for i := range max(1, c.samples) {
		first := (i + round) % 2
		for _, side := range [2]int{first, 1 - first} {
			if sides[side] == nil {
				continue
			}
			value, err := sides[side](ctx)
			if err == nil && value <= 0 {
				err = fmt.Errorf("measured %g %s, want more than nothing", value, c.unit)
			}
			if err != nil {
				return 0, 0, err
			}
			all[side] = append(all[side], value)
		}
	}
	return median(all[0]), median(all[1]), nil
}

// judge pairs what was measured in the same round.
func (c comparison) judge(ours, limit []float64) result {
	r := result{name: c.name, unit: c.unit, budget: c.budget, ours: median(ours), limit: median(limit)}
	noisy := ours
	if c.limit != nil {
		var ratios []float64
		for i := range ours {
			ratios = append(ratios, ours[i]/limit[i])
		}
		r.ratio = median(ratios)
		if c.budget.max == 0 {
			noisy = ratios
		}
	}
	r.noise = deviation(noisy)
	fifth := cmp.Or(c.budget.atMost, c.budget.atLeast, c.budget.max) / 5
	r.exceeded = c.budget.over(r.ratio, r.ours) > min(2*r.noise, fifth)
	return r
}

// median is 0 of nothing.
func median(of []float64) float64 {
	if len(of) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(of))
	half := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[half]
	}
	return (sorted[half-1] + sorted[half]) / 2
}

// deviation is the median of how far values are from their median.
func deviation(of []float64) float64 {
	middle := median(of)
	var off []float64
	for _, value := range of {
		off = append(off, math.Abs(value-middle))
	}
	return median(off)
}

// timed measures how long do takes, in microseconds. What is done before and after does not count.
func timed(before, do, after action) measureFunc {
	return func(ctx context.Context) (float64, error) {
		if err := before(ctx); err != nil {
			return 0, err
		}
		began := time.Now()
		err := do(ctx)
		took := time.Since(began)
		if err != nil {
			return 0, err
		}
		return float64(took.Nanoseconds()) / 1e3, after(ctx)
	}
}

// nothing is what is done where nothing is to be done.
func nothing(context.Context) error { return nil }

// inOrder is one thing after another.
func inOrder(actions ...action) action {
	return func(ctx context.Context) error {
		for _, do := range actions {
			if err := do(ctx); err != nil {
				return err
			}
		}
		return nil
	}
}

// A pair is a call and the one that undoes it. Rest waits for what the latter left to be done.
type pair struct{ do, undo, rest action }

// rows compare both calls of a pair with those of another.
func (p pair) rows(limit pair, how string, samples int, do, undo comparison) []comparison {
	do.name, do.unit, do.samples = do.name+how, micros, samples
	do.ours, do.limit = timed(nothing, p.do, inOrder(p.undo, p.rest)), timed(nothing, limit.do, inOrder(limit.undo, limit.rest))
	undo.name, undo.unit, undo.samples = undo.name+how, micros, samples
	undo.ours, undo.limit = timed(p.do, p.undo, p.rest), timed(limit.do, limit.undo, limit.rest)
	return []comparison{do, undo}
}
