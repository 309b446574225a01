package model

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// inodeShare is what an inode of XFS takes that no quota counts, as docs/quotas.md has it: all
// that the stand-in for quotas says of a directory.
const inodeShare = 544

// mostly picks an id that is there, or that is not, and sometimes any.
func (w *world) mostly(what string, from []string, there bool) string {
	wanted := slices.DeleteFunc(slices.Clone(from), func(name string) bool { return (w.volumes[name] != nil) != there })
	switch {
	case pick(w, "any", false, false, false, true):
		wanted = from
	case len(wanted) == 0:
		w.Skip()
	}
	return pick(w, what, wanted...)
}

// copy makes a volume from a snapshot or from another volume. Mostly it asks for what can be: the
// pool and the mode of the source.
func (w *world) copy() {
	c := creation{name: w.mostly("id", ids, false), source: w.mostly("source", entryIDs, true), elsewhere: w.flip("elsewhere")}
	in, modes := pools, []volume.Mode{volume.ModeMount, volume.ModeBlock}
	if s := w.volumes[c.source]; s != nil && !w.flip("any") {
		in, modes = []string{s.pool}, []volume.Mode{s.promise().mode}
	}
	if w.flip("of a size") {
		c.sizes = w.sizes()
	}
	c.pool, c.mode = pick(w, "pool", in...), pick(w, "mode", modes...)
	w.make(c)
}

// mayCopyTo is the answer of the source of a new volume.
func (w *world) mayCopyTo(c creation) error {
	err := w.mayCopy(c.source, volume.Verify)
	switch {
	case c.elsewhere && errors.Is(err, volume.ErrNotFound):
		return volume.ErrOtherNode
	case err == nil && w.volumes[c.source].record.mode != c.mode:
		return volume.ErrInvalid
	}
	return err
}

// mayCopy says whether a volume or a snapshot can be copied. Files of these pools share no blocks.
func (w *world) mayCopy(name string, when volume.WhenWritten) error {
	v := w.volumes[name]
	switch {
	case v == nil:
		return volume.ErrNotFound
	case v.torn:
		return volume.ErrDamagedRecord
	case v.dir == nil:
		return volume.ErrNotFound
	case v.pool == shared, v.record == nil, v.record.inline:
		return volume.ErrPrecondition
	case isSnapshot(name):
		return nil
	case v.record.mode == volume.ModeMount && when == volume.Freeze: // the pools are on a tmpfs
		return volume.ErrPrecondition
	case w.writable(v):
		return volume.ErrPrecondition
	}
	return nil
}

// writable reports whether a pod may write to a volume. A device that is published read-only counts too.
func (w *world) writable(v *modelVolume) bool {
	return slices.ContainsFunc(w.published(v, ""), func(target string) bool {
		return v.record.mode == volume.ModeBlock || !w.targets[target].readOnly
	})
}

// least is the smallest size of what is made from a volume or a snapshot, which is promised
// what it holds.
func least(name string, v *modelVolume) int64 {
	if isSnapshot(name) {
		return v.record.origin.bytes
	}
	return v.record.bytes
}

func (w *world) snapshot() {
	name, of := w.mostly("snapshot", snapshots, false), w.mostly("id", ids, true)
	when := pick(w, "when written", volume.Verify, volume.Freeze, volume.Accept)
	made := w.volumes[name] == nil
	want := w.maySnapshot(name, of, when)
	w.awaitTick(of)
	unlock := w.lock(name)
	got, err := w.set.Snapshots().Create(background, pool.SnapshotRequest{ID: id(name), Source: id(of), Way: pool.CopyWay{WhenWritten: when}})
	unlock()
	w.answer(err, want, "snapshot %s of %s, %s", name, of, when)
	if err != nil {
		return
	}
	v := w.volumes[name]
	if made {
		v.record.bytes = min(v.record.bytes, w.held(name, v))
	}
	w.sameSnapshot(name, v, got)
}

// maySnapshot is the answer to the creation of a snapshot. If it is nil the model has the
// snapshot, with the promise that is reserved for it.
func (w *world) maySnapshot(name, of string, when volume.WhenWritten) error {
	v, source := w.volumes[name], w.volumes[of]
	switch {
	case v != nil && !v.promised():
		return volume.ErrDamagedRecord
	case v != nil && v.record.origin.id != of:
		return volume.ErrExists
	case v != nil && v.dir == nil:
		return volume.ErrLost
	case v != nil:
		return nil
	}
	if err := w.mayCopy(of, when); err != nil {
		return err
	}
	rec := *source.record
	rec.origin = origin{of, source.record.bytes}
	if rec.kept && rec.mode == volume.ModeMount { // what it holds is counted: one inode, and then 1 MiB more
		rec.bytes = mib + block
	}
	if rec.bytes > w.available(source.pool) {
		return volume.ErrPrecondition
	}
	w.volumes[name] = &modelVolume{
		pool:   source.pool,
		dir:    &directory{stamp: source.dir.stamp, disk: source.dir.disk},
		record: &rec,
	}
	return nil
}

// held is what a new snapshot is promised at most: what it holds, where that is known.
func (w *world) held(name string, v *modelVolume) int64 {
	switch {
	case v.record.mode == volume.ModeBlock:
		var st syscall.Stat_t
		must.Succeed(w, syscall.Stat(filepath.Join(w.entry(name, v), v.dir.file()), &st))
		return st.Blocks * 512
	case v.record.kept:
		return inodeShare
	}
	return v.record.bytes
}

func (w *world) deleteSnapshot() {
	name, want := w.mostly("snapshot", snapshots, true), error(nil)
	if w.volumes[name] == nil {
		want = volume.ErrNotFound
	}
	delete(w.volumes, name)
	unlock := w.lock(name)
	err := w.set.Snapshots().Delete(background, id(name))
	unlock()
	w.answer(err, want, "delete snapshot %s", name)
}

// listSnapshots expects those that have a readable record: of others it is not known of what they are.
func (w *world) listSnapshots() {
	after, most := pick(w, "after", append([]string{""}, snapshots...)...), pick(w, "most", 1, 2, 10)
	of := pick(w, "of", append([]string{""}, ids...)...)
	want := slices.DeleteFunc(w.sorted(), func(name string) bool {
		v := w.volumes[name]
		return !isSnapshot(name) || !v.promised() || name <= after || of != "" && v.record.origin.id != of
	})
	var from, source volume.ID
	if after != "" {
		from = id(after)
	}
	if of != "" {
		source = id(of)
	}
	for more := true; more; more = from != (volume.ID{}) {
		var page []pool.Snapshot
		page, from = w.set.Snapshots().List(background, from, source, most)
		for _, s := range page {
			if len(want) == 0 || s.ID.String() != want[0] {
				w.Fatalf("after %q, of %q, comes %+v, want %v", after, of, s, want)
			}
			w.sameSnapshot(want[0], w.volumes[want[0]], s)
			want = want[1:]
		}
	}
	if len(want) > 0 {
		w.Fatalf("the list of snapshots ends before %v", want)
	}
}

// write changes what is in a volume. What was copied from it, and what it was copied from, has still
// what was there.
func (w *world) write() {
	name := pick(w, "id", ids...)
	v := w.volumes[name]
	if v == nil || v.dir == nil {
		w.Skip()
	}
	v.dir.stamp = ""
	w.stamp(name, v)
}

// checkSnapshot compares what is reported of one snapshot.
func (w *world) checkSnapshot(name string, v *modelVolume) {
	got, err := w.set.Snapshots().Find(background, id(name))
	if !v.promised() {
		w.answer(err, volume.ErrDamagedRecord, "find snapshot %s", name)
		return
	}
	must.Succeed(w, err)
	w.sameSnapshot(name, v, got)
}

func (w *world) sameSnapshot(name string, v *modelVolume, got pool.Snapshot) {
	type facts struct {
		ID, Pool    string
		Mode        volume.Mode
		Of          string
		Bytes       int64
		Consistency volume.Consistency
		Promised    int64
		Lost        bool
	}
	want := facts{name, v.pool, v.record.mode, v.record.origin.id, v.record.origin.bytes, volume.PointInTime, v.record.bytes, v.dir == nil}
	has := facts{got.ID.String(), got.Pool.String(), got.Mode, got.Origin.ID, got.Origin.Bytes, got.Origin.Consistency, got.Promised, got.Lost}
	if diff := cmp.Diff(want, has); diff != "" {
		w.Fatalf("snapshot (-want +got):\n%s", diff)
	}
}

// awaitTick waits until what changes gets another ctime than what has changed so far on the pool
// of a source, which a copy would take for a change under its eyes.
func (w *world) awaitTick(source string) {
	v := w.volumes[source]
	if v == nil {
		return
	}
	name := w.out(v.pool, ".hostpath-tick")
	var first, now syscall.Stat_t
	for first.Ctim == now.Ctim {
		must.Succeed(w, os.WriteFile(name, nil, 0o600))
		if must.Succeed(w, syscall.Stat(name, &now)); first.Ino == 0 {
			first = now
		}
	}
	must.Succeed(w, os.Remove(name))
}
