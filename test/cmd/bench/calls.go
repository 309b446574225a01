package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

const withoutSocket = ", without the socket"

// mountRows compare publishing with the system calls that it cannot do without:
// through the socket, where no call can cost less than an empty one, and without it.
func mountRows(ctx context.Context, s *scene) ([]comparison, error) {
	const id, name = "pvc-mount", "pvc-inside"
	a, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	pools, err := s.inside(ctx, a)
	if err != nil {
		return nil, err
	}
	inside, err := volume.ParseID(name)
	if err != nil {
		return nil, err
	}
	target, err := bind.ParseTarget(a.Target(name))
	if err != nil {
		return nil, err
	}
	_, err = pools.Create(ctx, pool.Request{ID: inside, Range: volume.Range{Required: volumeBytes}})
	bareTarget := a.Target("bare")
	if err := errors.Join(err, a.create(id, volumeBytes)(ctx), os.MkdirAll(filepath.Dir(bareTarget), 0o750), os.Mkdir(filepath.Dir(target.String()), 0o750)); err != nil {
		return nil, err
	}
	bare := pair{
		func(context.Context) error { return bindMount(filepath.Join(a.pool(), id), bareTarget) },
		func(context.Context) error { return unbindMount(bareTarget) }, nothing,
	}
	publish := comparison{name: "NodePublishVolume", budget: budget{atMost: 3}}
	unpublish := comparison{name: "NodeUnpublishVolume", budget: budget{atMost: 2}}
	rows := pair{a.publish(id), a.unpublish(id), nothing}.rows(
		pair{inOrder(a.ask, bare.do), inOrder(a.ask, bare.undo), nothing}, "", s.order.samples, publish, unpublish)
	rows = append(rows, pair{
		func(ctx context.Context) error {
			return pools.Publish(ctx, pool.Publication{ID: inside, Target: target})
		},
		func(ctx context.Context) error { return pools.Unpublish(ctx, inside, target) }, nothing,
	}.rows(bare, withoutSocket, s.order.samples, publish, unpublish)...)
	return append(rows, comparison{name: "an empty call", unit: micros, samples: s.order.samples, ours: timed(nothing, a.ask, nothing)}), nil
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

// callRows compare the calls that come all day with one that does nothing.
func callRows(ctx context.Context, s *scene) ([]comparison, error) {
	const id = "pvc-stats"
	a, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	one := func(name string, call action) comparison {
		return comparison{
			name: name, unit: micros, samples: s.order.samples, budget: budget{atMost: 1.5},
			ours: timed(nothing, call, nothing), limit: timed(nothing, a.ask, nothing),
		}
	}
	return []comparison{one("NodeGetVolumeStats", a.stats(id)), one("GetCapacity", a.capacity)},
		inOrder(a.create(id, volumeBytes), a.publish(id))(ctx)
}

// making is what making a volume may cost, as a multiple of the limit.
const making = 1.5

// creationRows compare making and removing a volume with what the disk and the
// kernel have to do for it, through the socket and without it.
func creationRows(ctx context.Context, s *scene) ([]comparison, error) {
	const name = "pvc-new"
	a, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	pools, err := s.inside(ctx, a)
	if err != nil {
		return nil, err
	}
	id, err := volume.ParseID(name)
	if err != nil {
		return nil, err
	}
	m, err := s.maker(a.beside("bare"))
	if err != nil {
		return nil, err
	}
	bare := m.pair(name)
	create := comparison{name: "CreateVolume", budget: budget{atMost: making}}
	remove := comparison{name: "DeleteVolume", budget: budget{atMost: 2}}
	rows := pair{a.create(name, volumeBytes), a.remove(name), settled(a.pool())}.rows(
		pair{inOrder(a.ask, bare.do), inOrder(a.ask, bare.undo), bare.rest}, "", s.order.fewer(3), create, remove)
	return append(rows, pair{
		func(ctx context.Context) error {
			_, err := pools.Create(ctx, pool.Request{ID: id, Range: volume.Range{Required: volumeBytes}})
			return err
		},
		func(ctx context.Context) error { return pools.Delete(ctx, id) }, settled(a.beside("inside")),
	}.rows(bare, withoutSocket, s.order.fewer(3), create, remove)...), nil
}

// removalRows compare removing a volume that is full of files with removing one that has none.
func removalRows(ctx context.Context, s *scene) ([]comparison, error) {
	const full, fresh = "pvc-full", "pvc-fresh"
	a, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	// While the files are made the driver sleeps, and its first call is slower.
	awake := func(ctx context.Context) (err error) {
		for range s.order.samples {
			err = errors.Join(err, a.ask(ctx))
		}
		return err
	}
	fill := func(context.Context) error { return scatter(filepath.Join(a.pool(), full), s.order.files, nil) }
	rest := settled(a.pool())
	return []comparison{{
		name: fmt.Sprintf("DeleteVolume with %s files", thousands(s.order.files)), unit: micros, budget: budget{atMost: 2},
		ours:  timed(inOrder(a.create(full, fullBytes), fill, awake), a.remove(full), rest),
		limit: timed(inOrder(a.create(fresh, volumeBytes), awake), a.remove(fresh), rest),
	}}, nil
}

const (
	// fullBytes is enough for the names of a great many files.
	fullBytes = 1 << 30
	// inEach is how many files are in a directory.
	inEach = 1000
)

// scatter makes files of one content in directories, and brings them to the disk: what waits
// to be written would be written by the next process that syncs.
func scatter(path string, files int, content []byte) error {
	for i := range files {
		d := filepath.Join(path, fmt.Sprintf("dir-%d", i/inEach))
		if i%inEach == 0 {
			if err := os.Mkdir(d, 0o755); err != nil {
				return err
			}
		}
		if err := os.WriteFile(filepath.Join(d, fmt.Sprintf("file-%d", i)), content, 0o600); err != nil {
			return err
		}
	}
	return syncfs(path)
}

func syncfs(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(d.Fd())), d.Close())
}

// parallelRows compare how many volumes are made in a second when many are asked for at once.
func parallelRows(ctx context.Context, s *scene) ([]comparison, error) {
	const inFlight = 16
	a, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	m, err := s.maker(a.beside("bare"))
	if err != nil {
		return nil, err
	}
	count := max(inFlight, s.order.samples)
	rate := func(of func(id string) pair) measureFunc {
		each := func(choose func(pair) action) action {
			return func(ctx context.Context) error {
				return inParallel(inFlight, count, func(i int) error { return choose(of(fmt.Sprintf("pvc-%d", i)))(ctx) })
			}
		}
		took := timed(nothing, each(func(p pair) action { return p.do }), each(func(p pair) action { return inOrder(p.undo, p.rest) }))
		return func(ctx context.Context) (float64, error) {
			micros, err := took(ctx)
			return float64(count) * 1e6 / micros, err
		}
	}
	return []comparison{{
		name: fmt.Sprintf("CreateVolume, %d in flight", inFlight), unit: eachSecond, budget: budget{atLeast: 1 / making},
		ours: rate(func(id string) pair { return pair{a.create(id, volumeBytes), a.remove(id), settled(a.pool())} }),
		limit: rate(func(id string) pair {
			bare := m.pair(id)
			return pair{inOrder(a.ask, bare.do), bare.undo, bare.rest}
		}),
	}}, nil
}

// inParallel does something count times, so many at a time.
func inParallel(inFlight, count int, do func(i int) error) error {
	numbers := make(chan int)
	problems := make([]error, inFlight)
	var workers sync.WaitGroup
	for worker := range problems {
		workers.Go(func() {
			for i := range numbers {
				problems[worker] = errors.Join(problems[worker], do(i))
			}
		})
	}
	for i := range count {
		numbers <- i
	}
	close(numbers)
	workers.Wait()
	return errors.Join(problems...)
}

// sizeRows report how large the program is.
func sizeRows(_ context.Context, s *scene) ([]comparison, error) {
	return []comparison{{
		name: "the program", unit: megabytes, budget: budget{max: drivertest.MostBytes / 1e6},
		ours: func(context.Context) (float64, error) {
			info, err := os.Stat(s.order.binary)
			if err != nil {
				return 0, err
			}
			return float64(info.Size()) / 1e6, nil
		},
	}}, nil
}
