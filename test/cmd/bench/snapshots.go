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
func snapshotRows(s *scene) (all []row) {
	for kind, treeRows := range map[string]func(*actor, *maker) []row{"xfs": fileRows, "btrfs": subvolumeRows} {
		s.makeFilesystem(kind, kind, filesystemBytes)
		a := s.enter(kind)
		m := s.maker(a.beside("bare"))
		for _, r := range append(treeRows(a, m), diskRow(a, m), stallRow(a)) {
			r.name += ", " + kind
			all = append(all, r)
		}
	}
	return all
}

// fileRows are those of a directory whose files are copied one by one.
func fileRows(a *actor, _ *maker) []row {
	s := a.s
	for id, files := range map[string]int{treeID: s.files / 2, smallerID: s.files / 10} {
		a.create(id, fullBytes)()
		scatter(filepath.Join(a.pool(), id), files, make([]byte, 4<<10))
	}
	a.create(emptyID, volumeBytes)()
	bare, smaller := a.beside("copied"), filepath.Join(a.pool(), smallerID)
	remove := func() { check(os.RemoveAll(bare)) }
	publish := timed(nothing, a.publish(emptyID), a.unpublish(emptyID))
	half, tenth := thousands(s.files/2), thousands(s.files/10)
	return []row{{
		name: fmt.Sprintf("CreateSnapshot of %s files", half), unit: micros, budget: budget{atMost: 2},
		ours: a.cut(treeID), limit: timed(nothing, func() { shareTree(filepath.Join(a.pool(), treeID), bare) }, remove),
	}, {
		name: fmt.Sprintf("finding out that %s files did not change", tenth), unit: micros, budget: budget{atMost: 0.1},
		ours: func() float64 {
			defer remove()
			_, checking := copyTree(s.ctx, smaller, bare)
			return checking
		},
		limit: func() float64 {
			defer remove()
			copying, _ := copyTree(s.ctx, smaller, bare)
			return copying
		},
	}, {
		name: fmt.Sprintf("NodePublishVolume while %s files are copied", tenth), unit: micros, budget: budget{atMost: 1.2},
		ours: func() float64 {
			made := make(chan error, 1)
			go func() { made <- try(a.snapshot(smallerID)) }()
			var all []float64
			for {
				select {
				case err := <-made:
					check(err)
					a.uncut()
					return median(all)
				default:
					all = append(all, publish())
				}
			}
		},
		limit: func() float64 {
			var all []float64
			for range s.samples {
				all = append(all, publish())
			}
			return median(all)
		},
	}}
}

// subvolumeRows are those of a directory that the filesystem copies at once.
func subvolumeRows(a *actor, m *maker) []row {
	path := filepath.Join(a.pool(), treeID)
	a.create(treeID, fullBytes)()
	scatter(path, inEach, make([]byte, 4<<10))
	subvolume := func(id string) *dir.Dir {
		source := got(dir.Open(path))
		check(clone.Subvolume(source, m.creating, id), source.Close())
		return got(m.creating.Open(id))
	}
	return []row{a.cutRow("a subvolume", treeID, 3, m.pair(cutName, fullBytes, subvolume, func(*dir.Dir) {}))}
}

// diskRow is that of a block volume.
func diskRow(a *actor, m *maker) row {
	source := a.createDisk()
	writeDisk(source, a.s.disk)
	return a.cutRow("a block volume", diskID, 1.5, m.pair(cutName, 2*a.s.disk, m.newDir, func(d *dir.Dir) { shareDisk(d, source) }))
}

// cutRow compares a snapshot with a volume that a maker makes of the same content.
func (a *actor) cutRow(what, of string, atMost float64, bare pair) row {
	return row{
		"CreateSnapshot of " + what, micros, budget{atMost: atMost}, a.s.fewer(10),
		a.cut(of), timed(nothing, inOrder(a.ask, bare.do), inOrder(bare.undo, bare.rest)),
	}
}

// noCopyOnWrite is FS_NOCOW_FL of linux/fs.h.
const noCopyOnWrite = 0x00800000

// shareDisk makes the file of a block volume in a directory, durably, with the blocks of another.
func shareDisk(d *dir.Dir, source string) {
	from, to := got(os.Open(source)), got(d.MakeFile(diskFile))
	defer from.Close()
	// On btrfs both have the same flag for copy-on-write, which the driver switches off.
	if flags := got(unix.IoctlGetUint32(int(from.Fd()), unix.FS_IOC_GETFLAGS)); flags&noCopyOnWrite != 0 {
		check(unix.IoctlSetPointerInt(int(to.Fd()), unix.FS_IOC_SETFLAGS, noCopyOnWrite))
	}
	check(unix.IoctlFileClone(int(to.Fd()), int(from.Fd())), to.Sync(), to.Close())
}

// cut measures making a snapshot, which is removed again.
func (a *actor) cut(of string) func() float64 { return timed(nothing, a.snapshot(of), a.uncut) }

func (a *actor) snapshot(of string) action {
	return func() { got(a.Snapshot(a.s.ctx, cutName, of, "")) }
}

func (a *actor) uncut() {
	check(a.DeleteSnapshot(a.s.ctx, cutName+"@"+nodeName))
	a.s.settled(a.pool())()
}

// shareTree makes a copy of a tree as scatter makes one, by what the kernel needs for it and
// nothing else. It has no attributes.
func shareTree(from, to string) {
	check(os.Mkdir(to, 0o700))
	for _, d := range got(os.ReadDir(from)) {
		check(os.Mkdir(filepath.Join(to, d.Name()), 0o700))
		src, dst := got(os.Open(filepath.Join(from, d.Name()))), got(os.Open(filepath.Join(to, d.Name())))
		for _, name := range got(src.Readdirnames(0)) {
			in := got(unix.Openat(int(src.Fd()), name, unix.O_RDONLY|unix.O_CLOEXEC, 0))
			out := got(unix.Openat(int(dst.Fd()), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600))
			check(unix.IoctlFileClone(out, in), unix.Close(out), unix.Close(in))
		}
		check(src.Close(), dst.Close())
	}
	syncfs(to)
}

// copyTree copies a tree as the driver does, and checks whether that is of one moment. It measures both, in
// microseconds.
func copyTree(ctx context.Context, from, to string) (copying, checking float64) {
	check(os.Mkdir(to, 0o700))
	src, dst := got(dir.Open(from)), got(dir.Open(to))
	defer func() { check(src.Close(), dst.Close()) }()
	began := time.Now()
	last := began // when copying the last entry began
	result := got(clone.Tree(ctx, src, dst, clone.Options{Rounds: 1, Pause: func(context.Context) error {
		last = time.Now()
		return nil
	}}))
	if !result.PointInTime {
		check(fmt.Errorf("%d entries of %s have changed, want none", result.Changed, from))
	}
	return micro(last.Sub(began)), micro(time.Since(last))
}

// stallRow compares how long sharing a file takes whose blocks are scattered with what is
// predicted, for which maxStall refuses snapshots. The prediction is for a CPU that has nothing else to do:
// so what is measured is the time of the CPU.
func stallRow(a *actor) row {
	from := got(os.Create(a.beside("shattered")))
	a.s.ends = append(a.s.ends, from.Close)
	// A hole after each block, so that none lies next to another.
	block := slices.Repeat([]byte{1}, 4<<10)
	for i := range a.s.files / 10 {
		got(from.WriteAt(block, int64(i)*2*int64(len(block))))
	}
	check(from.Sync())
	extents := got(clone.Extents(from))
	return row{
		name: fmt.Sprintf("FICLONE of %s extents, predicted", thousands(extents)), unit: micros, budget: budget{atMost: 1.5},
		ours: func() float64 {
			to := got(os.Create(a.beside("shattered.copy")))
			took, err := onCPU(func() error { return unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) })
			check(err, os.Remove(to.Name()), to.Sync(), to.Close())
			return took
		},
		limit: func() float64 { return micro(clone.Stall(extents)) },
	}
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
