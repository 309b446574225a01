package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// pageEntries are so many that what the page itself costs does not count.
const pageEntries = 100

// readyWithin is how long a start may take with the reference's volumes, and memoryAt how
// much memory the driver may have with that many.
const (
	readyWithin = 0.5e6 // µs
	memoryAt    = 48    // MiB
)

// flat is how much longer a call may take with many volumes than with none.
const flat = 1.5

const withNone = "with no volumes"

// prepareScale compares drivers whose pools have many volumes with one whose pool has
// none. All of them run at the same time.
func prepareScale(ctx context.Context, s *scene) ([]comparison, error) {
	var calls, starts []comparison
	var none, few *actor
	for _, volumes := range s.order.volumes {
		a, err := s.enterWith(ctx, volumes)
		if err != nil {
			return nil, err
		}
		starts = append(starts, s.starts(a, volumes)...)
		if volumes == 0 {
			none = a
			calls = append(calls, s.emptyPage(a))
			continue
		}
		if few == nil {
			few = a
		}
		if none != nil {
			calls = append(calls, s.callsAt(a, none, volumes)...)
		}
		calls = append(calls, comparison{
			name: fmt.Sprintf("ListVolumes, a page of %d, %s volumes", pageEntries, thousands(volumes)), unit: micros, samples: s.order.fewer(3),
			limit: "opening each directory of the page", ours: timed(a.page), bare: timed(a.openPage),
		})
		if a != few {
			calls = append(calls, comparison{
				name: calls[len(calls)-1].name, unit: micros, samples: s.order.fewer(3),
				limit: "with the fewest volumes", budget: budget{AtMost: flat}, ours: timed(a.page), bare: timed(few.page),
			})
		}
	}
	// Starts come last: the calls are of drivers that have been running for a while.
	return append(calls, starts...), nil
}

// volumeID is one of the volumes that a pool has, as long as external-provisioner makes them:
// the driver remembers all of them.
func volumeID(i int) string { return fmt.Sprintf("pvc-00000000-0000-4000-8000-%012d", i) }

// statsID is the volume of each scale that is published.
const statsID = "pvc-0-stats"

// enterWith starts a driver on a pool that has volumes already, and one more.
func (s *scene) enterWith(ctx context.Context, volumes int) (*actor, error) {
	a, err := s.enter(ctx, func(pool string) (err error) {
		m, err := newMaker(pool)
		if err != nil {
			return err
		}
		m.lazy = true
		defer func() { err = errors.Join(err, m.close()) }()
		for i := range volumes {
			if err := errors.Join(ctx.Err(), m.make(volumeID(i))); err != nil {
				return err
			}
		}
		return m.sync()
	})
	if err != nil {
		return nil, err
	}
	if err := whenServed(ctx, func() error { return a.create(ctx, statsID) }); err != nil {
		return nil, err
	}
	return a, a.publish(ctx, statsID)
}

// whenServed repeats a call until the pool serves: a driver whose pool takes long takes
// calls before.
func whenServed(ctx context.Context, call func() error) error {
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for {
		err := call()
		if status.Code(err) != codes.Unavailable {
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// restart starts a driver that was stopped, and waits until its pool serves.
func (a *actor) restart(ctx context.Context) error {
	if err := a.Process.Restart(ctx); err != nil {
		return err
	}
	return whenServed(ctx, func() error { return a.stats(ctx, statsID) })
}

// emptyPage has but the volume that is published in it: there is nothing to compare a page of
// many with where there are none.
func (s *scene) emptyPage(a *actor) comparison {
	return comparison{
		name: "ListVolumes, 0 volumes", unit: micros, samples: s.order.fewer(3),
		limit: "an empty call", ours: timed(a.page), bare: timed(a.nothing),
	}
}

func (s *scene) callsAt(a, none *actor, volumes int) []comparison {
	const id = "pvc-1-new"
	one := func(name string, samples int, how func(a *actor) measureFunc) comparison {
		return comparison{
			name: fmt.Sprintf("%s, %s volumes", name, thousands(volumes)), unit: micros, limit: withNone,
			samples: samples, budget: budget{AtMost: flat}, ours: how(a), bare: how(none),
		}
	}
	return []comparison{
		one("CreateVolume", s.order.fewer(10), func(a *actor) measureFunc {
			create := timed(func(ctx context.Context) error { return a.create(ctx, id) })
			return then(then(create, func(ctx context.Context) error { return a.Delete(ctx, id) }), a.settle)
		}),
		one("NodeGetVolumeStats", s.order.fewer(3), func(a *actor) measureFunc {
			return timed(func(ctx context.Context) error { return a.stats(ctx, statsID) })
		}),
		one("GetCapacity", s.order.fewer(3), func(a *actor) measureFunc { return timed(a.capacity) }),
	}
}

// starts are how long a driver takes until it is ready, and its memory when it has done since
// then what it is to do all day.
func (s *scene) starts(a *actor, volumes int) []comparison {
	var ready, memory budget
	if volumes == s.order.reference {
		ready, memory = budget{Max: readyWithin}, budget{Max: memoryAt}
	}
	start := comparison{
		name: "start, " + thousands(volumes) + " volumes", unit: micros, budget: ready,
		ours: after(func(context.Context) error { return a.Process.Stop() }, timed(a.restart)),
	}
	if volumes > 0 {
		start.limit, start.bare = "listing the volumes and reading each record", timed(a.readRecords)
	}
	// The most so far, which is since the start.
	most := comparison{
		name: "memory, " + thousands(volumes) + " volumes", unit: mebibytes, budget: memory,
		ours: after(a.isWatched, a.memory("VmHWM")),
	}
	return []comparison{start, most}
}

// openPage does what is needed to know which volumes of a page are there.
func (a *actor) openPage(context.Context) error {
	root, err := os.OpenRoot(a.pool())
	if err != nil {
		return err
	}
	defer root.Close()
	for i := range pageEntries {
		d, err := root.Open(volumeID(i))
		if err != nil {
			return err
		}
		d.Close()
	}
	return nil
}

// readRecords does what cannot be left out to know the volumes of a pool.
func (a *actor) readRecords(context.Context) error {
	if _, err := os.ReadDir(a.pool()); err != nil {
		return err
	}
	records := filepath.Join(a.pool(), ".hostpath-provisioner", "volumes")
	entries, err := os.ReadDir(records)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if _, err := os.ReadFile(filepath.Join(records, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}
