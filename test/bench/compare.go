package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
)

// A comparison is something of the driver's and what it is built on. Both are
// measured in the same unit, and more is better.
type comparison struct {
	name string
	unit string
	// budget is the least ratio of the first to the second.
	budget float64
	// ours and bare measure once.
	ours, bare func(ctx context.Context) (float64, error)
}

// A result is what a comparison has come to.
type result struct {
	Name string `json:"name"`
	Unit string `json:"unit"`
	// Ours and Bare are medians over the rounds.
	Ours float64 `json:"ours"`
	Bare float64 `json:"bare"`
	// Ratio is the median of the rounds' ratios, and Noise the median of how far those
	// are from it.
	Ratio  float64 `json:"ratio"`
	Noise  float64 `json:"noise"`
	Budget float64 `json:"budget"`
	// Exceeded: the ratio is worse than the budget by more than twice the noise.
	Exceeded bool `json:"exceeded"`
}

// compare measures everything in each round, ours and bare next to each other and in
// turn first, so that what else the machine does slows both.
func compare(ctx context.Context, comparisons []comparison, rounds int, progress io.Writer) ([]result, error) {
	ours, bare := make([][]float64, len(comparisons)), make([][]float64, len(comparisons))
	for round := range rounds {
		fmt.Fprintf(progress, "round %d of %d\n", round+1, rounds)
		for i, c := range comparisons {
			one, other, err := c.measure(ctx, round%2 == 1)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.name, err)
			}
			ours[i], bare[i] = append(ours[i], one), append(bare[i], other)
		}
	}
	var results []result
	for i, c := range comparisons {
		results = append(results, c.judge(ours[i], bare[i]))
	}
	return results, nil
}

func (c comparison) measure(ctx context.Context, bareFirst bool) (ours, bare float64, err error) {
	if bareFirst {
		if bare, err = c.bare(ctx); err == nil {
			ours, err = c.ours(ctx)
		}
	} else {
		if ours, err = c.ours(ctx); err == nil {
			bare, err = c.bare(ctx)
		}
	}
	if err == nil && (ours <= 0 || bare <= 0) {
		err = fmt.Errorf("measured %g and %g %s, want more than nothing", ours, bare, c.unit)
	}
	return ours, bare, err
}

// judge pairs what was measured in the same round.
func (c comparison) judge(ours, bare []float64) result {
	var ratios, off []float64
	for i := range ours {
		ratios = append(ratios, ours[i]/bare[i])
	}
	ratio := median(ratios)
	for _, r := range ratios {
		off = append(off, math.Abs(r-ratio))
	}
	noise := median(off)
	return result{
		Name: c.name, Unit: c.unit,
		Ours: median(ours), Bare: median(bare),
		Ratio: ratio, Noise: noise,
		Budget: c.budget, Exceeded: ratio+2*noise < c.budget,
	}
}

func median(of []float64) float64 {
	sorted := slices.Sorted(slices.Values(of))
	half := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[half]
	}
	return (sorted[half-1] + sorted[half]) / 2
}
