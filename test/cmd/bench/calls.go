package main

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// prepareCalls compares the calls that come all day with one that does nothing.
func prepareCalls(ctx context.Context, s *scene) ([]comparison, error) {
	a, err := s.enter(ctx, nil)
	if err != nil {
		return nil, err
	}
	if err := a.create(ctx, "pvc-stats"); err != nil {
		return nil, err
	}
	if err := a.publish(ctx, "pvc-stats"); err != nil {
		return nil, err
	}
	one := func(name string, call func(context.Context) error, allowed float64) comparison {
		return comparison{
			name: name, unit: micros, limit: "an empty call", samples: s.order.samples,
			budget: budget{AtMost: allowed}, ours: timed(call), bare: timed(a.nothing),
		}
	}
	return []comparison{
		one("NodeGetVolumeStats", func(ctx context.Context) error { return a.stats(ctx, "pvc-stats") }, 1.5),
		one("GetCapacity", a.capacity, 1.5),
	}, nil
}

// timed measures how long something takes, in microseconds.
func timed(do func(ctx context.Context) error) measureFunc {
	return func(ctx context.Context) (float64, error) {
		began := time.Now()
		err := do(ctx)
		return float64(time.Since(began).Nanoseconds()) / 1e3, err
	}
}

// directoryVolume is a directory volume. None is meant to be filled, and many have to fit.
func directoryVolume(id string) drivertest.Volume {
	return drivertest.Volume{ID: id, Pool: poolName, Bytes: volumeBytes}
}

const volumeBytes = 64 << 10

// nothing is a call that does nothing but travel.
func (a *actor) nothing(ctx context.Context) error {
	_, err := a.Identity().GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	return err
}

func (a *actor) create(ctx context.Context, id string) error {
	_, err := a.Create(ctx, directoryVolume(id))
	return err
}

// publish publishes a volume for a pod of the same name.
func (a *actor) publish(ctx context.Context, id string) error {
	return a.Publish(ctx, directoryVolume(id), id)
}

func (a *actor) unpublish(ctx context.Context, id string) error { return a.Unpublish(ctx, id, id) }

func (a *actor) stats(ctx context.Context, id string) error {
	_, err := a.Stats(ctx, id, id)
	return err
}

func (a *actor) capacity(ctx context.Context) error {
	_, err := a.Capacity(ctx, poolName)
	return err
}

// page asks for the first volumes.
func (a *actor) page(ctx context.Context) error {
	_, err := a.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: pageEntries})
	return err
}
