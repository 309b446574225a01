package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// What publishing and unpublishing may cost, as a multiple of the limit.
const (
	publishing   = 3
	unpublishing = 2
)

// prepareMounts compares publishing with the system calls that it cannot do without:
// through the socket, where no call can cost less than an empty one, and without it.
func prepareMounts(ctx context.Context, s *scene) ([]comparison, error) {
	const id = "pvc-mount"
	a, err := s.enter(ctx, nil)
	if err != nil {
		return nil, err
	}
	if err := a.create(ctx, id); err != nil {
		return nil, err
	}
	bareTarget := a.Target("bare")
	if err := os.Mkdir(filepath.Dir(bareTarget), 0o750); err != nil {
		return nil, err
	}
	in, err := a.publishInside(ctx)
	if err != nil {
		return nil, err
	}
	bare := pair{
		func(context.Context) error { return bindMount(filepath.Join(a.pool(), id), bareTarget) },
		func(context.Context) error { return unbindMount(bareTarget) },
	}
	const calls = "the bare system calls"
	var all []comparison
	for _, way := range []struct {
		how, limit string
		ours, bare pair
	}{
		{"", "an empty call and " + calls, pair{
			func(ctx context.Context) error { return a.publish(ctx, id) },
			func(ctx context.Context) error { return a.unpublish(ctx, id) },
		}, pair{both(a.nothing, bare.do), both(a.nothing, bare.undo)}},
		{", without the socket", calls, in, bare},
	} {
		all = append(all, comparison{
			name: "NodePublishVolume" + way.how, unit: micros, limit: way.limit, samples: s.order.samples, budget: budget{AtMost: publishing},
			ours: then(timed(way.ours.do), way.ours.undo), bare: then(timed(way.bare.do), way.bare.undo),
		}, comparison{
			name: "NodeUnpublishVolume" + way.how, unit: micros, limit: way.limit, samples: s.order.samples, budget: budget{AtMost: unpublishing},
			ours: after(way.ours.do, timed(way.ours.undo)), bare: after(way.bare.do, timed(way.bare.undo)),
		})
	}
	return append(all, comparison{
		name: "an empty call", unit: micros, limit: calls + " of publishing", samples: s.order.samples,
		ours: timed(a.nothing), bare: then(timed(bare.do), bare.undo),
	}), nil
}

// A pair is something and what undoes it.
type pair struct{ do, undo func(context.Context) error }

// publishInside publishes a volume of its own as the driver does, in this process.
func (a *actor) publishInside(ctx context.Context) (pair, error) {
	const name = "pvc-inside"
	pools, id, err := a.inside(ctx, name)
	if err != nil {
		return pair{}, err
	}
	target, err := bind.ParseTarget(a.Target(name))
	if err != nil {
		return pair{}, err
	}
	if err := os.Mkdir(filepath.Dir(target.String()), 0o750); err != nil {
		return pair{}, err
	}
	_, err = pools.Create(ctx, pool.Request{ID: id, Range: volume.Range{Required: volumeBytes}})
	return pair{
		func(ctx context.Context) error { return pools.Publish(ctx, pool.Publication{ID: id, Target: target}) },
		func(ctx context.Context) error { return pools.Unpublish(ctx, id, target) },
	}, err
}

// after has something done before each measurement, and then after it. Neither counts.
func after(before func(context.Context) error, measure measureFunc) measureFunc {
	return func(ctx context.Context) (float64, error) {
		if err := before(ctx); err != nil {
			return 0, err
		}
		return measure(ctx)
	}
}

func both(one, other func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := one(ctx); err != nil {
			return err
		}
		return other(ctx)
	}
}

func then(measure measureFunc, undo func(context.Context) error) measureFunc {
	return func(ctx context.Context) (float64, error) {
		value, err := measure(ctx)
		if err != nil {
			return 0, err
		}
		return value, undo(ctx)
	}
}

// bindMount makes a directory appear at a path that is not there yet, by what the
// kernel needs for it and nothing else.
func bindMount(source, target string) error {
	if err := os.Mkdir(target, 0o750); err != nil {
		return err
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open_tree %s: %w", source, err)
	}
	attributes := unix.MountAttr{Propagation: unix.MS_PRIVATE}
	err = unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attributes)
	if err == nil {
		err = unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	return errors.Join(err, unix.Close(tree))
}

func unbindMount(target string) error {
	if err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", target, err)
	}
	return unix.Rmdir(target)
}
