package main

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

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
func snapshotRows(h *harness) (all []row) {
	for _, kind := range []string{"xfs", "btrfs"} {
		h.makeFilesystem(kind, kind, filesystemBytes)
		a := h.enter(kind)
		rows := []row{diskRow(a, h.maker(a.beside("bare")))}
		if kind == "xfs" {
			rows = append(rows, fileRows(a)...)
		}
		for _, r := range rows {
			r.name += ", " + kind
			all = append(all, r)
		}
	}
	return all
}

// fileRows are those of a directory whose files are copied one by one.
func fileRows(a *actor) []row {
	h := a.s
	for id, files := range map[string]int{treeID: h.files / 2, smallerID: h.files / 10} {
		a.create(id, fullBytes)()
		scatter(filepath.Join(a.pool(), id), files, make([]byte, 4<<10))
	}
	a.create(emptyID, volumeBytes)()
	bare := a.beside("copied")
	remove := func() { check(os.RemoveAll(bare)) }
	publish := timed(nothing, a.publish(emptyID), a.unpublish(emptyID))
	half, tenth := thousands(h.files/2), thousands(h.files/10)
	return []row{{
		name: fmt.Sprintf("CreateSnapshot of %s files", half), unit: micros, budget: budget{atMost: 2},
		ours: a.cut(treeID), limit: timed(nothing, func() { shareTree(filepath.Join(a.pool(), treeID), bare) }, remove),
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
			for range h.samples {
				all = append(all, publish())
			}
			return median(all)
		},
	}}
}

// diskRow compares a snapshot of a block volume with a volume that a maker makes of the same content.
func diskRow(a *actor, m *maker) row {
	source := a.createDisk()
	writeDisk(source, a.s.disk)
	bare := m.pair(cutName, 2*a.s.disk, m.newDir, func(d *dir.Dir) { shareDisk(d, source) })
	return row{
		"CreateSnapshot of a block volume", micros, budget{atMost: 1.5}, a.s.fewer(10),
		a.cut(diskID), timed(nothing, inOrder(a.ask, bare.do), inOrder(bare.undo, bare.rest)),
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
