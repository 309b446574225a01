package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

const durably = "the same durable sequence without the driver"

// What making and removing may cost, as a multiple of the limit.
const (
	making   = 1.5
	removing = 2
)

// prepareCreation compares making and removing a volume with what the disk and the
// kernel have to do for it, through the socket and without it, as prepareMounts does.
func prepareCreation(ctx context.Context, s *scene) ([]comparison, error) {
	const name = "pvc-new"
	a, err := s.enter(ctx, nil)
	if err != nil {
		return nil, err
	}
	pools, id, err := a.inside(ctx, name)
	if err != nil {
		return nil, err
	}
	m, err := s.maker(a)
	if err != nil {
		return nil, err
	}
	bare := pair{
		func(context.Context) error { return m.make(name) },
		func(context.Context) error { return m.remove(name) },
	}
	emptied := func(context.Context) error { return m.empty(name) }
	var all []comparison
	for _, way := range []struct {
		how, limit string
		ours, bare pair
		pool       string
	}{
		{"", "an empty call and " + durably, pair{
			func(ctx context.Context) error { return a.create(ctx, name) },
			func(ctx context.Context) error { return a.Delete(ctx, name) },
		}, pair{both(a.nothing, bare.do), both(a.nothing, bare.undo)}, a.pool()},
		{", without the socket", durably, pair{
			func(ctx context.Context) error {
				_, err := pools.Create(ctx, pool.Request{ID: id, Range: volume.Range{Required: volumeBytes}})
				return err
			},
			func(ctx context.Context) error { return pools.Delete(ctx, id) },
		}, bare, a.insidePool()},
	} {
		settled := func(ctx context.Context) error { return settle(ctx, way.pool) }
		all = append(all, comparison{
			name: "CreateVolume" + way.how, unit: micros, limit: way.limit, samples: s.order.fewer(3), budget: budget{AtMost: making},
			ours: then(then(timed(way.ours.do), way.ours.undo), settled),
			bare: then(then(timed(way.bare.do), bare.undo), emptied),
		}, comparison{
			name: "DeleteVolume" + way.how, unit: micros, limit: way.limit, samples: s.order.fewer(3), budget: budget{AtMost: removing},
			ours: then(after(way.ours.do, timed(way.ours.undo)), settled),
			bare: then(after(bare.do, timed(way.bare.undo)), emptied),
		})
	}
	return all, nil
}

// maker works outside an actor's pool, on the same filesystem. It is closed when the
// scene is struck.
func (s *scene) maker(a *actor) (*maker, error) {
	m, err := newMaker(a.beside("bare"))
	if err == nil {
		a.ends = append(a.ends, m.close)
	}
	return m, err
}

// settle waits until the reaper has nothing to do, so that what it does to the disk is
// not taken for something else.
func (a *actor) settle(ctx context.Context) error { return settle(ctx, a.pool()) }

func settle(ctx context.Context, pool string) error {
	trash := filepath.Join(pool, ".hostpath-provisioner", "trash", nodeName)
	again := time.NewTicker(500 * time.Microsecond)
	defer again.Stop()
	for {
		left, err := os.ReadDir(trash)
		if err != nil || len(left) == 0 {
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for %d volumes to be erased: %w", len(left), context.Cause(ctx))
		}
	}
}
