package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// prepareParallel compares how many volumes are made in a second when many are asked
// for at once.
func prepareParallel(ctx context.Context, s *scene) ([]comparison, error) {
	a, err := s.enter(ctx, nil)
	if err != nil {
		return nil, err
	}
	m, err := s.maker(a)
	if err != nil {
		return nil, err
	}
	var all []comparison
	for _, inFlight := range []int{1, 16, 64} {
		count := max(inFlight, s.order.samples)
		each := func(do func(ctx context.Context, id string) error) func(context.Context) error {
			return func(ctx context.Context) error { return inParallel(ctx, inFlight, count, do) }
		}
		bare := func(do func(id string) error) func(context.Context) error {
			return each(func(_ context.Context, id string) error { return do(id) })
		}
		called := func(ctx context.Context, id string) error {
			if err := a.nothing(ctx); err != nil {
				return err
			}
			return m.make(id)
		}
		all = append(all, comparison{
			name: fmt.Sprintf("CreateVolume, %d in flight", inFlight), unit: eachSecond, limit: "an empty call and " + durably,
			budget: budget{AtLeast: 1 / making},
			ours:   then(then(rate(count, each(a.create)), each(a.Delete)), a.settle),
			bare:   then(then(rate(count, each(called)), bare(m.remove)), bare(m.empty)),
		})
	}
	return all, nil
}

// rate measures how often something is done in a second that takes place count times.
func rate(count int, do func(ctx context.Context) error) measureFunc {
	return func(ctx context.Context) (float64, error) {
		began := time.Now()
		err := do(ctx)
		return float64(count) / time.Since(began).Seconds(), err
	}
}

// inParallel does something to count volumes, to so many at a time.
func inParallel(ctx context.Context, inFlight, count int, do func(ctx context.Context, id string) error) error {
	ids := make(chan string)
	problems := make([]error, inFlight)
	var workers sync.WaitGroup
	for worker := range problems {
		workers.Go(func() {
			for id := range ids {
				if problems[worker] == nil {
					problems[worker] = do(ctx, id)
				}
			}
		})
	}
	for i := range count {
		ids <- fmt.Sprintf("pvc-%d", i)
	}
	close(ids)
	workers.Wait()
	return errors.Join(problems...)
}
