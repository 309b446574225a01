package main

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
)

func TestJudgeToleratesNoise(t *testing.T) {
	least, most := budget{AtLeast: 0.7}, budget{AtMost: 1.5}
	for name, test := range map[string]struct {
		ours, bare   []float64
		ratio, noise float64
		budget       budget
		exceeded     bool
	}{
		"the machine slows down in the middle": {[]float64{80, 40, 20}, []float64{100, 50, 25}, 0.8, 0, least, false},
		"as good as the budget":                {[]float64{7, 7}, []float64{10, 10}, 0.7, 0, least, false},
		"less than at least":                   {[]float64{6, 6, 6}, []float64{10, 10, 10}, 0.6, 0, least, true},
		"less, but not by more than noise":     {[]float64{5, 6, 7}, []float64{10, 10, 10}, 0.6, 0.1, least, false},
		"less by more than any noise":          {[]float64{1, 5, 9}, []float64{10, 10, 10}, 0.5, 0.4, least, true},
		"one round was disturbed":              {[]float64{9, 1, 9}, []float64{10, 10, 10}, 0.9, 0, least, false},
		"as much as the budget":                {[]float64{15, 15}, []float64{10, 10}, 1.5, 0, most, false},
		"more than at most":                    {[]float64{16, 16, 17}, []float64{10, 10, 10}, 1.6, 0, most, true},
		"more, but not by more than noise":     {[]float64{14, 16, 18}, []float64{10, 10, 10}, 1.6, 0.2, most, false},
		"more by more than any noise":          {[]float64{6, 19, 40}, []float64{10, 10, 10}, 1.9, 1.3, most, true},
		"no budget":                            {[]float64{90, 90}, []float64{10, 10}, 9, 0, budget{}, false},
		"a figure below its most":              {[]float64{40, 39, 38}, nil, 0, 1, budget{Max: 40}, false},
		"a figure above its most":              {[]float64{41, 41, 45}, nil, 0, 0, budget{Max: 40}, true},
		"a figure above it by noise":           {[]float64{39, 41, 45}, nil, 0, 2, budget{Max: 40}, false},
		"a figure above it by more than that":  {[]float64{20, 49, 90}, nil, 0, 29, budget{Max: 40}, true},
		"a figure with a limit":                {[]float64{30, 41, 41}, []float64{1, 41, 41}, 1, 0, budget{Max: 40}, true},
	} {
		t.Run(name, func(t *testing.T) {
			c := comparison{budget: test.budget}
			if test.bare != nil {
				c.bare = fixed(1)
			}
			got := c.judge(test.ours, test.bare)
			if off(got.Ratio, test.ratio) || off(got.Noise, test.noise) || got.Exceeded != test.exceeded {
				t.Errorf("judge = %+v, want the ratio %g, noise %g, exceeded %v", got, test.ratio, test.noise, test.exceeded)
			}
		})
	}
}

func fixed(value float64) measureFunc {
	return func(context.Context) (float64, error) { return value, nil }
}

func off(got, want float64) bool { return got < want-1e-9 || got > want+1e-9 }

func TestCompareInterleavesRounds(t *testing.T) {
	var order []string
	note := func(what string, value float64) measureFunc {
		return func(context.Context) (float64, error) {
			order = append(order, what)
			return value, nil
		}
	}
	results, err := compare(t.Context(), []comparison{
		{name: "a", ours: note("a", 3), bare: note("A", 4)},
		{name: "b", ours: note("b", 5), bare: note("B", 5)},
	}, 2, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Split("a A b B A a B b", " "); !slices.Equal(order, want) {
		t.Errorf("measured in the order %q, want %q", order, want)
	}
	if len(results) != 2 || off(results[0].Ratio, 0.75) || off(results[1].Ratio, 1) {
		t.Errorf("results %+v, want the ratios 0.75 and 1", results)
	}
}

// What one row takes more of, others do not.
func TestNoisyResultIsMeasuredAgain(t *testing.T) {
	count := make(map[string]int)
	row := func(name string, allowed budget, values ...float64) comparison {
		return comparison{name: name, budget: allowed, ours: func(context.Context) (float64, error) {
			count[name]++
			return values[min(count[name], len(values))-1], nil
		}}
	}
	most := budget{Max: 100}
	results, err := compare(t.Context(), []comparison{
		row("quiet", most, 90, 91, 92),
		row("noisy without a budget", budget{}, 10, 90, 50),
		row("disturbed at first", most, 90, 190, 240, 90),
		row("noisy always", most, 60, 160, 110, 60, 160, 110),
	}, 3, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct {
		rounds   int
		exceeded bool
	}{{3, false}, {3, false}, {5, false}, {6, false}} {
		r := results[i]
		if count[r.Name] != want.rounds || r.Exceeded != want.exceeded {
			t.Errorf("%s was measured %d times, exceeded %v, want %+v", r.Name, count[r.Name], r.Exceeded, want)
		}
	}
}

func TestSamplesInterleaveAndUseMedian(t *testing.T) {
	var order []string
	from := func(what string, values ...float64) measureFunc {
		return func(context.Context) (float64, error) {
			order = append(order, what)
			value := values[0]
			values = values[1:]
			return value, nil
		}
	}
	results, err := compare(t.Context(), []comparison{{samples: 3, ours: from("a", 30, 99, 20), bare: from("A", 1, 10, 20)}}, 1, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Split("a A A a a A", " "); !slices.Equal(order, want) {
		t.Errorf("measured in the order %q, want %q", order, want)
	}
	if off(results[0].Ours, 30) || off(results[0].Bare, 10) || off(results[0].Ratio, 3) {
		t.Errorf("result %+v, want the medians 30 and 10", results[0])
	}
}

func TestResultWithoutLimit(t *testing.T) {
	results, err := compare(t.Context(), []comparison{{ours: fixed(7), budget: budget{Max: 6}}}, 3, io.Discard)
	if err != nil || off(results[0].Ours, 7) || results[0].Ratio != 0 || !results[0].Exceeded {
		t.Errorf("results %+v, %v; want 7, which exceeds", results, err)
	}
}

func TestCompareReturnsErrors(t *testing.T) {
	failed := errors.New("failed")
	fine := fixed(1)
	for name, c := range map[string]comparison{
		"ours": {name: "a", bare: fine, ours: func(context.Context) (float64, error) { return 0, failed }},
		"bare": {name: "a", ours: fine, bare: func(context.Context) (float64, error) { return 0, failed }},
	} {
		if _, err := compare(t.Context(), []comparison{c}, 1, io.Discard); !errors.Is(err, failed) {
			t.Errorf("compare = %v where %s fails", err, name)
		}
	}
	nothing := comparison{name: "a", ours: fine, bare: fixed(0)}
	if _, err := compare(t.Context(), []comparison{nothing}, 1, io.Discard); err == nil {
		t.Error("nothing was measured, and that is no error")
	}
}
