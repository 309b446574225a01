package main

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
)

func TestJudgeComparesWithinARoundAndForgivesNoise(t *testing.T) {
	for name, test := range map[string]struct {
		ours, bare            []float64
		ratio, noise, allowed float64
		exceeded              bool
	}{
		"the machine slows down in the middle": {[]float64{80, 40, 20}, []float64{100, 50, 25}, 0.8, 0, 0.7, false},
		"as good as the budget":                {[]float64{7, 7}, []float64{10, 10}, 0.7, 0, 0.7, false},
		"worse":                                {[]float64{6, 6, 6}, []float64{10, 10, 10}, 0.6, 0, 0.7, true},
		"worse, but not by more than noise":    {[]float64{4, 6, 8}, []float64{10, 10, 10}, 0.6, 0.2, 0.7, false},
		"one round was disturbed":              {[]float64{9, 1, 9}, []float64{10, 10, 10}, 0.9, 0, 0.7, false},
	} {
		t.Run(name, func(t *testing.T) {
			got := comparison{budget: test.allowed}.judge(test.ours, test.bare)
			if off(got.Ratio, test.ratio) || off(got.Noise, test.noise) || got.Exceeded != test.exceeded {
				t.Errorf("judge = %+v, want the ratio %g, noise %g, exceeded %v", got, test.ratio, test.noise, test.exceeded)
			}
		})
	}
}

func off(got, want float64) bool { return got < want-1e-9 || got > want+1e-9 }

func TestCompareInterleavesAndTakesTurns(t *testing.T) {
	var order []string
	note := func(what string, value float64) func(context.Context) (float64, error) {
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

func TestCompareEndsWithWhatFails(t *testing.T) {
	failed := errors.New("failed")
	fine := func(context.Context) (float64, error) { return 1, nil }
	for name, c := range map[string]comparison{
		"ours": {name: "a", bare: fine, ours: func(context.Context) (float64, error) { return 0, failed }},
		"bare": {name: "a", ours: fine, bare: func(context.Context) (float64, error) { return 0, failed }},
	} {
		if _, err := compare(t.Context(), []comparison{c}, 1, io.Discard); !errors.Is(err, failed) {
			t.Errorf("compare = %v where %s fails", err, name)
		}
	}
	nothing := comparison{name: "a", ours: fine, bare: func(context.Context) (float64, error) { return 0, nil }}
	if _, err := compare(t.Context(), []comparison{nothing}, 1, io.Discard); err == nil {
		t.Error("nothing was measured, and that is no error")
	}
}
