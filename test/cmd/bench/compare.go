package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"slices"
)

// A measureFunc measures once.
type measureFunc func(ctx context.Context) (float64, error)

// A comparison is a figure of the driver and its limit, in the same unit.
type comparison struct {
	name string
	unit unit
	// limit says what the limit is; empty where there is none.
	limit string
	// samples is how often each is measured in a round, in turns; 0 stands for once.
	// Their median is what the round has.
	samples int
	budget  budget
	ours    measureFunc
	bare    measureFunc // nil where there is no limit
}

// A budget bounds what a figure may be. The zero budget allows everything.
type budget struct {
	// AtMost and AtLeast bound the ratio of ours to the limit; Max bounds ours itself,
	// in its unit.
	AtMost  float64 `json:"atMost,omitempty"`
	AtLeast float64 `json:"atLeast,omitempty"`
	Max     float64 `json:"max,omitempty"`
}

// over is by how much a ratio, or a figure, is worse than the budget; not above 0 if it
// is kept.
func (b budget) over(ratio, ours float64) float64 {
	switch {
	case b.AtMost > 0:
		return ratio - b.AtMost
	case b.AtLeast > 0:
		return b.AtLeast - ratio
	case b.Max > 0:
		return ours - b.Max
	}
	return 0
}

// forgiven is how much of a budget noise may excuse at most.
const forgiven = 0.2

// excused is by how much the budget may be missed at most, however large the noise is.
func (b budget) excused() float64 { return forgiven * cmp.Or(b.AtMost, b.AtLeast, b.Max) }

// A result is what a comparison has come to.
type result struct {
	Group string `json:"group"`
	Name  string `json:"name"`
	Unit  unit   `json:"unit"`
	// Ours and Bare are medians over the rounds. Bare is that of the limit.
	Ours  float64 `json:"ours"`
	Limit string  `json:"limit,omitempty"`
	Bare  float64 `json:"bare,omitempty"`
	// Ratio is the median of the rounds' ratios of ours to the limit; 0 without a limit.
	Ratio float64 `json:"ratio,omitempty"`
	// Noise is the median of how far what the budget is about, or else the ratio, or
	// else ours, was from its median.
	Noise  float64 `json:"noise"`
	Budget budget  `json:"budget"`
	// Exceeded: it is worse than the budget by more than twice the noise, or by more than
	// noise excuses.
	Exceeded bool `json:"exceeded"`
}

// unclear reports whether the noise is more than the budget can excuse.
func (r result) unclear() bool { return r.Budget != budget{} && r.Noise > r.Budget.excused() }

// compare measures everything in each round, ours and bare next to each other and in
// turn first, so that what else the machine does slows both. What is too noisy to be judged
// then is measured again, in at most as many rounds more.
func compare(ctx context.Context, comparisons []comparison, rounds int, progress io.Writer) ([]result, error) {
	ours, bare := make([][]float64, len(comparisons)), make([][]float64, len(comparisons))
	for round := range 2 * rounds {
		again := round >= rounds
		if !again {
			fmt.Fprintf(progress, "round %d of %d\n", round+1, rounds)
		}
		for i, c := range comparisons {
			if again && !c.judge(ours[i], bare[i]).unclear() {
				continue
			}
			if again {
				fmt.Fprintf(progress, "once more: %s\n", c.name)
			}
			one, other, err := c.measure(ctx, round%2 == 1)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.name, err)
			}
			ours[i] = append(ours[i], one)
			if c.bare != nil {
				bare[i] = append(bare[i], other)
			}
		}
	}
	var results []result
	for i, c := range comparisons {
		results = append(results, c.judge(ours[i], bare[i]))
	}
	return results, nil
}

// measure is one round: the medians of the samples.
func (c comparison) measure(ctx context.Context, bareFirst bool) (ours, bare float64, err error) {
	var all [2][]float64
	sides := [2]measureFunc{c.ours, c.bare}
	for i := range max(1, c.samples) {
		first := i % 2
		if bareFirst {
			first = 1 - first
		}
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
	ours = median(all[0])
	if c.bare != nil {
		bare = median(all[1])
	}
	return ours, bare, nil
}

// judge pairs what was measured in the same round.
func (c comparison) judge(ours, bare []float64) result {
	r := result{Name: c.name, Unit: c.unit, Limit: c.limit, Budget: c.budget, Ours: median(ours)}
	noisy := ours
	if c.bare != nil {
		var ratios []float64
		for i := range ours {
			ratios = append(ratios, ours[i]/bare[i])
		}
		r.Bare, r.Ratio = median(bare), median(ratios)
		if c.budget.Max == 0 {
			noisy = ratios
		}
	}
	r.Noise = deviation(noisy)
	r.Exceeded = c.budget.over(r.Ratio, r.Ours) > min(2*r.Noise, c.budget.excused())
	return r
}

func median(of []float64) float64 {
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
