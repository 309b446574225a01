package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// What snapshots may cost, as a multiple of the limit.
const (
	snapshotOfTree      = 2
	snapshotOfSubvolume = 3
	snapshotOfDisk      = 1.5
	verifying           = 0.05
	whileCutting        = 1.2
	// stalling is how much longer than predicted sharing a file may take.
	stalling = 1.5
)

// Volumes that snapshots are made of.
const (
	treeID    = "pvc-tree"
	smallerID = "pvc-smaller"
	emptyID   = "pvc-empty"
	diskID    = "pvc-disk"
	cutName   = "cut"
)

// prepareSnapshots compares snapshots with what the filesystem has to do for them. What that is
// depends on its kind, so each has a filesystem of its own, whatever that of other groups is.
func prepareSnapshots(ctx context.Context, s *scene) ([]comparison, error) {
	var all []comparison
	for _, of := range []struct {
		kind string
		rows func(context.Context, *scene, *actor, *maker) ([]comparison, error)
	}{{"xfs", treeRows}, {"btrfs", subvolumeRows}} {
		a, err := s.enterOn(ctx, of.kind)
		if errors.Is(err, loopfs.ErrMissing) {
			s.missing = append(s.missing, fmt.Sprintf("snapshots on %s: %v", of.kind, err))
			continue
		}
		if err != nil {
			return nil, err
		}
		m, err := s.maker(a)
		if err != nil {
			return nil, err
		}
		rows, err := of.rows(ctx, s, a, m)
		if err != nil {
			return nil, err
		}
		disks, err := diskRows(ctx, s, a, m)
		if err != nil {
			return nil, err
		}
		stalls, err := stallRows(s, a)
		if err != nil {
			return nil, err
		}
		// The first snapshot of a volume writes its record anew.
		for _, id := range []string{treeID, diskID} {
			if _, err := a.cut(id)(ctx); err != nil {
				return nil, err
			}
		}
		for _, c := range slices.Concat(rows, disks, stalls) {
			c.name += ", " + of.kind
			all = append(all, c)
		}
	}
	return all, nil
}

// treeRows are those of a directory whose files are copied one by one.
func treeRows(ctx context.Context, s *scene, a *actor, _ *maker) ([]comparison, error) {
	content := make([]byte, 4<<10)
	for id, files := range map[string]int{treeID: s.order.files / 2, smallerID: s.order.files / 10} {
		if _, err := a.Create(ctx, drivertest.Volume{ID: id, Pool: poolName, Bytes: fullBytes}); err != nil {
			return nil, err
		}
		if err := scatter(ctx, filepath.Join(a.pool(), id), files, content); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(a.create(ctx, emptyID), a.create(ctx, statsID)); err != nil {
		return nil, err
	}
	if err := a.publish(ctx, statsID); err != nil {
		return nil, err
	}
	if err := a.snapshots(ctx, emptyID, pageEntries); err != nil {
		return nil, err
	}
	repeated := func(ctx context.Context) error { return a.snapshot(ctx, pageName(0), emptyID) }
	files, bare := thousands(s.order.files/2), a.beside("copied")
	rows := []comparison{{
		name: fmt.Sprintf("CreateSnapshot of %s files", files), unit: micros, budget: budget{AtMost: snapshotOfTree},
		limit: "making each file and sharing its blocks by the bare system calls, and one syncfs",
		ours:  a.cut(treeID),
		bare: then(timed(func(context.Context) error { return shareTree(filepath.Join(a.pool(), treeID), bare) }),
			func(context.Context) error { return os.RemoveAll(bare) }),
	}, a.verification(smallerID, s.order.files/10), {
		name: "CreateSnapshot again", unit: micros, samples: s.order.samples, budget: budget{AtMost: 1.5},
		limit: "an empty call", ours: timed(repeated), bare: timed(a.nothing),
	}, {
		name: "ListSnapshots of one", unit: micros, samples: s.order.samples, budget: budget{AtMost: 1.5},
		limit: "an empty call", ours: timed(a.listOne), bare: timed(a.nothing),
	}, {
		name: fmt.Sprintf("ListSnapshots, a page of %d", pageEntries), unit: micros, samples: s.order.fewer(3),
		limit: "opening the directory and reading the record of each", ours: timed(a.snapshotPage), bare: timed(a.openSnapshots),
	}}
	while := fmt.Sprintf(" while %s files are copied", thousands(s.order.files/10))
	for _, call := range []struct {
		name string
		once measureFunc
	}{
		{"NodePublishVolume", then(timed(func(ctx context.Context) error { return a.publish(ctx, emptyID) }), func(ctx context.Context) error { return a.unpublish(ctx, emptyID) })},
		{"NodeGetVolumeStats", timed(func(ctx context.Context) error { return a.stats(ctx, statsID) })},
	} {
		rows = append(rows, comparison{
			name: call.name + while, unit: micros, budget: budget{AtMost: whileCutting}, limit: call.name,
			ours: a.meanwhile(smallerID, call.once), bare: often(s.order.samples, call.once),
		})
	}
	return rows, nil
}

// subvolumeRows are those of a directory that the filesystem copies at once.
func subvolumeRows(ctx context.Context, s *scene, a *actor, m *maker) ([]comparison, error) {
	if _, err := a.Create(ctx, drivertest.Volume{ID: treeID, Pool: poolName, Bytes: fullBytes}); err != nil {
		return nil, err
	}
	source := filepath.Join(a.pool(), treeID)
	if err := scatter(ctx, source, s.order.files/100, make([]byte, 4<<10)); err != nil {
		return nil, err
	}
	bare := both(a.nothing, func(context.Context) error { return m.makeFrom(cutName, source) })
	return []comparison{{
		name: "CreateSnapshot of a subvolume", unit: micros, samples: s.order.fewer(10), budget: budget{AtMost: snapshotOfSubvolume},
		limit: "an empty call, BTRFS_IOC_SNAP_CREATE_V2, a limit and a durable record",
		ours:  a.cut(treeID),
		bare: then(then(timed(bare), func(context.Context) error { return m.remove(cutName) }),
			func(context.Context) error { return m.empty(cutName) }),
	}}, nil
}

// diskRows are those of a block volume.
func diskRows(ctx context.Context, s *scene, a *actor, m *maker) ([]comparison, error) {
	if _, err := a.Create(ctx, drivertest.Volume{ID: diskID, Pool: poolName, Block: true, Bytes: s.order.disk}); err != nil {
		return nil, err
	}
	source := filepath.Join(a.pool(), diskID, diskFile)
	if err := writeDisk(source, s.order.disk); err != nil {
		return nil, err
	}
	share := func(fd int) error { return shareInto(fd, source) }
	bare := both(a.nothing, func(context.Context) error { return m.makeWith(cutName, 2*s.order.disk, share) })
	return []comparison{{
		name: "CreateSnapshot of a block volume", unit: micros, samples: s.order.fewer(10), budget: budget{AtMost: snapshotOfDisk},
		limit: "an empty call, FICLONE, fsync and a durable record",
		ours:  a.cut(diskID),
		bare: then(then(timed(bare), func(context.Context) error { return m.remove(cutName) }),
			func(context.Context) error { return m.empty(cutName) }),
	}}, nil
}

// stallRows compare how long sharing a file takes whose blocks are scattered with what is
// predicted, for which maxStall refuses snapshots. The prediction is for a CPU that has nothing else to do:
// so what is measured is the time of the CPU.
func stallRows(s *scene, a *actor) ([]comparison, error) {
	path, copied := a.beside("shattered"), a.beside("shattered.copy")
	extents, err := shatter(path, s.order.files/10)
	if err != nil {
		return nil, err
	}
	predicted := float64(clone.Stall(extents).Nanoseconds()) / 1e3
	return []comparison{{
		name: fmt.Sprintf("CPU time of FICLONE of %s extents", thousands(extents)), unit: micros, budget: budget{AtMost: stalling},
		limit: fmt.Sprintf("the prediction, %s for each", clone.PerExtent),
		ours: func(context.Context) (float64, error) {
			from, err := os.Open(path)
			if err != nil {
				return 0, err
			}
			defer from.Close()
			to, err := os.OpenFile(copied, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
			if err != nil {
				return 0, err
			}
			defer to.Close()
			took, err := onCPU(func() error { return unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) })
			return took, errors.Join(err, os.Remove(copied), to.Sync())
		},
		bare: func(context.Context) (float64, error) { return predicted, nil },
	}}, nil
}

// onCPU measures for how long a CPU is at work on a call, in microseconds.
func onCPU(call func() error) (float64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, after unix.Timespec
	// Not getrusage(2), which may count in ticks.
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &before); err != nil {
		return 0, err
	}
	if err := call(); err != nil {
		return 0, err
	}
	err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &after)
	return float64(after.Nano()-before.Nano()) / 1e3, err
}

// shatter makes a file of that many blocks with a hole after each, so that none lies next to
// another, and answers how many extents it has.
func shatter(path string, blocks int) (extents int, err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	block := []byte(strings.Repeat("bench", 4<<10)[:4<<10])
	for i := range blocks {
		if _, err := f.WriteAt(block, int64(i)*2*int64(len(block))); err != nil {
			return 0, err
		}
	}
	if err := f.Sync(); err != nil {
		return 0, err
	}
	return clone.Extents(f)
}

// snapshot makes a snapshot.
func (a *actor) snapshot(ctx context.Context, name, of string) error {
	_, err := a.Snapshot(ctx, name, of, "")
	return err
}

// cut measures making a snapshot, which is removed again.
func (a *actor) cut(of string) measureFunc {
	return then(timed(func(ctx context.Context) error { return a.snapshot(ctx, cutName, of) }), a.uncut)
}

func (a *actor) uncut(ctx context.Context) error {
	if err := a.DeleteSnapshot(ctx, cutName+"@"+nodeName); err != nil {
		return err
	}
	return a.settle(ctx)
}

// snapshots makes some of one volume.
func (a *actor) snapshots(ctx context.Context, of string, count int) error {
	for i := range count {
		if err := a.snapshot(ctx, pageName(i), of); err != nil {
			return err
		}
	}
	return nil
}

func pageName(i int) string { return fmt.Sprintf("snapshot-%03d", i) }

// listOne asks as csi-snapshotter does.
func (a *actor) listOne(ctx context.Context) error {
	list, err := a.Controller().ListSnapshots(ctx, &csi.ListSnapshotsRequest{SnapshotId: pageName(0) + "@" + nodeName})
	if err == nil && len(list.GetEntries()) != 1 {
		err = fmt.Errorf("%d snapshots are listed, want one", len(list.GetEntries()))
	}
	return err
}

func (a *actor) snapshotPage(ctx context.Context) error {
	list, err := a.Controller().ListSnapshots(ctx, &csi.ListSnapshotsRequest{MaxEntries: pageEntries})
	if err == nil && len(list.GetEntries()) != pageEntries {
		err = fmt.Errorf("%d snapshots are listed, want %d", len(list.GetEntries()), pageEntries)
	}
	return err
}

// openSnapshots does what is needed to know the snapshots of a page.
func (a *actor) openSnapshots(context.Context) error {
	root, err := os.OpenRoot(filepath.Join(a.pool(), ".hostpath-provisioner"))
	if err != nil {
		return err
	}
	defer root.Close()
	for i := range pageEntries {
		name := "~" + pageName(i)
		d, err := root.Open(filepath.Join("snapshots", name))
		if err != nil {
			return err
		}
		d.Close()
		if _, err := root.ReadFile(filepath.Join("volumes", name+".json")); err != nil {
			return err
		}
	}
	return nil
}

// often measures something some times, and has the median.
func often(times int, once measureFunc) measureFunc {
	return func(ctx context.Context) (float64, error) {
		var all []float64
		for range times {
			value, err := once(ctx)
			if err != nil {
				return 0, err
			}
			all = append(all, value)
		}
		return median(all), nil
	}
}

// meanwhile measures something as often as it can be done while a snapshot is made, and has the
// median.
func (a *actor) meanwhile(of string, once measureFunc) measureFunc {
	return func(ctx context.Context) (float64, error) {
		made := make(chan error, 1)
		go func() { made <- a.snapshot(ctx, cutName, of) }()
		var all []float64
		var failed error
		for {
			select {
			case err := <-made:
				if err := errors.Join(err, failed); err != nil {
					return 0, err
				}
				if len(all) == 0 {
					return 0, errors.New("the snapshot was made before anything was measured")
				}
				return median(all), a.uncut(ctx)
			default:
			}
			value, err := once(ctx)
			if err != nil {
				failed = err
			}
			all = append(all, value)
		}
	}
}

// verification compares finding out that nothing has changed with copying a tree, in this process.
func (a *actor) verification(of string, files int) comparison {
	from, to := filepath.Join(a.pool(), of), a.beside("verified")
	pass := func(choose func(passes) float64) measureFunc {
		return then(func(ctx context.Context) (float64, error) {
			took, err := copyTree(ctx, from, to)
			return choose(took), err
		}, func(context.Context) error { return os.RemoveAll(to) })
	}
	return comparison{
		name: fmt.Sprintf("finding out that %s files did not change", thousands(files)), unit: micros,
		limit: "copying them, without the socket", budget: budget{AtMost: verifying},
		ours: pass(func(p passes) float64 { return p.check }), bare: pass(func(p passes) float64 { return p.copy }),
	}
}

// makeFrom makes a volume that is a snapshot of a subvolume.
func (m *maker) makeFrom(id, source string) error {
	return m.put(id, fullBytes, func() (kept string, err error) {
		d, err := m.snapshot(id, source)
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, d.Close()) }()
		if err := m.quota.Limit(d, 0, quota.Limit{Bytes: fullBytes}); err != nil {
			return "", err
		}
		return fmt.Sprintf(`"quota":%q,`, m.quota.Kind()), m.fsync(d.Fd())
	})
}
