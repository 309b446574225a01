package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// Volumes that snapshots are made of, and the snapshot.
const (
	treeID    = "pvc-tree"
	smallerID = "pvc-smaller"
	emptyID   = "pvc-empty"
	diskID    = "pvc-disk"
	cutName   = "cut"
)

// snapshotRows compare snapshots with what the filesystem has to do for them. What that is
// depends on its kind, so each has a filesystem of its own, whatever that of other groups is.
func snapshotRows(ctx context.Context, s *scene) ([]comparison, error) {
	var all []comparison
	for _, kind := range []string{"xfs", "btrfs"} {
		treeRows := fileRows
		if kind == "btrfs" {
			treeRows = subvolumeRows
		}
		if err := makeFilesystem(ctx, s.path(kind), kind); err != nil {
			return nil, err
		}
		a, err := s.enterOn(ctx, s.path(kind))
		if err != nil {
			return nil, err
		}
		m, err := s.maker(a.beside("bare"))
		if err != nil {
			return nil, err
		}
		rows, err := treeRows(ctx, s, a, m)
		if err != nil {
			return nil, err
		}
		disk, err := diskRow(ctx, s, a, m)
		if err != nil {
			return nil, err
		}
		stall, err := stallRow(s, a)
		if err != nil {
			return nil, err
		}
		for _, c := range append(rows, disk, stall) {
			c.name += ", " + kind
			all = append(all, c)
		}
	}
	return all, nil
}

// fileRows are those of a directory whose files are copied one by one.
func fileRows(ctx context.Context, s *scene, a *actor, _ *maker) ([]comparison, error) {
	for id, files := range map[string]int{treeID: s.order.files / 2, smallerID: s.order.files / 10} {
		if err := errors.Join(a.create(id, fullBytes)(ctx), scatter(filepath.Join(a.pool(), id), files, make([]byte, 4<<10))); err != nil {
			return nil, err
		}
	}
	if err := a.create(emptyID, volumeBytes)(ctx); err != nil {
		return nil, err
	}
	bare := a.beside("copied")
	remove := func(context.Context) error { return os.RemoveAll(bare) }
	publish := timed(nothing, a.publish(emptyID), a.unpublish(emptyID))
	pass := func(choose func(copying, checking float64) float64) measureFunc {
		return func(ctx context.Context) (float64, error) {
			copying, checking, err := copyTree(ctx, filepath.Join(a.pool(), smallerID), bare)
			return choose(copying, checking), errors.Join(err, remove(ctx))
		}
	}
	fewer := thousands(s.order.files / 10)
	return []comparison{{
		name: fmt.Sprintf("CreateSnapshot of %s files", thousands(s.order.files/2)), unit: micros, budget: budget{atMost: 2},
		ours:  a.cut(treeID),
		limit: timed(nothing, func(context.Context) error { return shareTree(filepath.Join(a.pool(), treeID), bare) }, remove),
	}, {
		name: fmt.Sprintf("finding out that %s files did not change", fewer), unit: micros, budget: budget{atMost: 0.05},
		ours:  pass(func(_, checking float64) float64 { return checking }),
		limit: pass(func(copying, _ float64) float64 { return copying }),
	}, {
		name: fmt.Sprintf("NodePublishVolume while %s files are copied", fewer), unit: micros, budget: budget{atMost: 1.2},
		ours: a.meanwhile(smallerID, publish), limit: func(ctx context.Context) (float64, error) {
			var all []float64
			for range s.order.samples {
				value, err := publish(ctx)
				if err != nil {
					return 0, err
				}
				all = append(all, value)
			}
			return median(all), nil
		},
	}}, nil
}

// subvolumeRows are those of a directory that the filesystem copies at once.
func subvolumeRows(ctx context.Context, s *scene, a *actor, m *maker) ([]comparison, error) {
	path := filepath.Join(a.pool(), treeID)
	if err := errors.Join(a.create(treeID, fullBytes)(ctx), scatter(path, inEach, make([]byte, 4<<10))); err != nil {
		return nil, err
	}
	snapshot := func(id string) (*dir.Dir, error) {
		source, err := dir.Open(path)
		if err != nil {
			return nil, err
		}
		if err := errors.Join(clone.Subvolume(source, m.creating, id), source.Close()); err != nil {
			return nil, err
		}
		return m.creating.Open(id)
	}
	row := a.cutRow("a subvolume", treeID, m, fullBytes, snapshot, func(*dir.Dir) error { return nil })
	row.samples, row.budget.atMost = s.order.fewer(10), 3
	return []comparison{row}, nil
}

// diskRow is that of a block volume.
func diskRow(ctx context.Context, s *scene, a *actor, m *maker) (comparison, error) {
	source := filepath.Join(a.pool(), diskID, diskFile)
	_, err := a.Create(ctx, drivertest.Volume{ID: diskID, Pool: poolName, Block: true, Bytes: s.order.disk})
	if err := errors.Join(err, writeDisk(source, s.order.disk)); err != nil {
		return comparison{}, err
	}
	row := a.cutRow("a block volume", diskID, m, 2*s.order.disk, m.newDir, func(d *dir.Dir) error { return shareDisk(d, source) })
	row.samples, row.budget.atMost = s.order.fewer(10), 1.5
	return row, nil
}

// cutRow compares a snapshot with a volume that a maker makes of the same content.
func (a *actor) cutRow(what, of string, m *maker, bytes int64, newDir func(string) (*dir.Dir, error), fill func(*dir.Dir) error) comparison {
	bare := m.pair(cutName)
	bare.do = func(context.Context) error { return m.make(cutName, bytes, newDir, fill) }
	return comparison{
		name: "CreateSnapshot of " + what, unit: micros,
		ours: a.cut(of), limit: timed(nothing, inOrder(a.ask, bare.do), inOrder(bare.undo, bare.rest)),
	}
}

// noCopyOnWrite is FS_NOCOW_FL of linux/fs.h.
const noCopyOnWrite = 0x00800000

// shareDisk makes the file of a block volume in a directory, durably, with the blocks of another.
func shareDisk(d *dir.Dir, source string) error {
	from, err := os.Open(source)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := d.MakeFile(diskFile)
	if err != nil {
		return err
	}
	// On btrfs both have the same flag for copy-on-write, which the driver switches off.
	flags, err := unix.IoctlGetUint32(int(from.Fd()), unix.FS_IOC_GETFLAGS)
	if err == nil && flags&noCopyOnWrite != 0 {
		err = unix.IoctlSetPointerInt(int(to.Fd()), unix.FS_IOC_SETFLAGS, noCopyOnWrite)
	}
	if err == nil {
		err = unix.IoctlFileClone(int(to.Fd()), int(from.Fd()))
	}
	return errors.Join(err, to.Sync(), to.Close())
}

// cut measures making a snapshot, which is removed again.
func (a *actor) cut(of string) measureFunc { return timed(nothing, a.snapshot(of), a.uncut) }

func (a *actor) snapshot(of string) action {
	return func(ctx context.Context) error {
		_, err := a.Snapshot(ctx, cutName, of, "")
		return err
	}
}

func (a *actor) uncut(ctx context.Context) error {
	if err := a.DeleteSnapshot(ctx, cutName+"@"+nodeName); err != nil {
		return err
	}
	return settled(a.pool())(ctx)
}

// meanwhile measures something as often as it can be done while a snapshot is made, and has the
// median.
func (a *actor) meanwhile(of string, once measureFunc) measureFunc {
	return func(ctx context.Context) (float64, error) {
		made := make(chan error, 1)
		go func() { made <- a.snapshot(of)(ctx) }()
		var all []float64
		var failed error
		for {
			select {
			case err := <-made:
				if err := errors.Join(err, failed); err != nil {
					return 0, err
				}
				return median(all), a.uncut(ctx)
			default:
				value, err := once(ctx)
				failed = errors.Join(failed, err)
				all = append(all, value)
			}
		}
	}
}

// shareTree makes a copy of a tree as scatter makes one, by what the kernel needs for it and
// nothing else. It has no attributes.
func shareTree(from, to string) error {
	dirs, err := os.ReadDir(from)
	if err := errors.Join(err, os.Mkdir(to, 0o700)); err != nil {
		return err
	}
	for _, d := range dirs {
		if err := shareDir(filepath.Join(from, d.Name()), filepath.Join(to, d.Name())); err != nil {
			return err
		}
	}
	return syncfs(to)
}

func shareDir(from, to string) error {
	if err := os.Mkdir(to, 0o700); err != nil {
		return err
	}
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.Open(to)
	if err != nil {
		return err
	}
	defer dst.Close()
	names, err := src.Readdirnames(0)
	for _, name := range names {
		err = errors.Join(err, shareFile(int(src.Fd()), int(dst.Fd()), name))
	}
	return err
}

func shareFile(in, at int, name string) error {
	from, err := unix.Openat(in, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	to, err := unix.Openat(at, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return errors.Join(err, unix.Close(from))
	}
	return errors.Join(unix.IoctlFileClone(to, from), unix.Close(to), unix.Close(from))
}

// copyTree copies a tree as the driver does, and checks whether that is of one moment. It measures both, in
// microseconds.
func copyTree(ctx context.Context, from, to string) (copying, checking float64, err error) {
	src, err := dir.Open(from)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	if err := os.Mkdir(to, 0o700); err != nil {
		return 0, 0, err
	}
	dst, err := dir.Open(to)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	began := time.Now()
	last := began // when copying the last entry began
	result, err := clone.Tree(ctx, src, dst, clone.Options{Rounds: 1, Pause: func(context.Context) error {
		last = time.Now()
		return nil
	}})
	if err == nil && !result.PointInTime {
		err = fmt.Errorf("%d entries of %s have changed, want none", result.Changed, from)
	}
	return float64(last.Sub(began).Nanoseconds()) / 1e3, float64(time.Since(last).Nanoseconds()) / 1e3, err
}

// stallRow compares how long sharing a file takes whose blocks are scattered with what is
// predicted, for which maxStall refuses snapshots. The prediction is for a CPU that has nothing else to do:
// so what is measured is the time of the CPU.
func stallRow(s *scene, a *actor) (comparison, error) {
	from, err := os.Create(a.beside("shattered"))
	if err != nil {
		return comparison{}, err
	}
	s.ends = append(s.ends, from.Close)
	// A hole after each block, so that none lies next to another.
	block := slices.Repeat([]byte{1}, 4<<10)
	for i := range s.order.files / 10 {
		if _, err := from.WriteAt(block, int64(i)*2*int64(len(block))); err != nil {
			return comparison{}, err
		}
	}
	if err := from.Sync(); err != nil {
		return comparison{}, err
	}
	extents, err := clone.Extents(from)
	predicted := float64(clone.Stall(extents).Nanoseconds()) / 1e3
	return comparison{
		name: fmt.Sprintf("FICLONE of %s extents, predicted", thousands(extents)), unit: micros, budget: budget{atMost: 1.5},
		ours: func(context.Context) (float64, error) {
			to, err := os.Create(a.beside("shattered.copy"))
			if err != nil {
				return 0, err
			}
			took, err := onCPU(func() error { return unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) })
			return took, errors.Join(err, os.Remove(to.Name()), to.Sync(), to.Close())
		},
		limit: func(context.Context) (float64, error) { return predicted, nil },
	}, err
}

// onCPU measures for how long a CPU is at work on a call, in microseconds.
func onCPU(call func() error) (float64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, after unix.Timespec
	// Not getrusage(2), which may count in ticks.
	err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &before)
	err = errors.Join(err, call(), unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &after))
	return float64(after.Nano()-before.Nano()) / 1e3, err
}
