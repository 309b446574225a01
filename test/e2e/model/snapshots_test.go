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
func (h *harness) mostly(what string, from []string, there bool) string {
	wanted := slices.DeleteFunc(slices.Clone(from), func(name string) bool { return (h.volumes[name] != nil) != there })
	switch {
	case pick(h, "any", false, false, false, true):
		wanted = from
	case len(wanted) == 0:
		h.Skip()
	}
	return pick(h, what, wanted...)
}

// copy makes a volume from a snapshot or from another volume. Mostly it asks for what can be: the
// pool and the mode of the source.
func (h *harness) copy() {
	c := creation{name: h.mostly("id", ids, false), source: h.mostly("source", entryIDs, true), elsewhere: h.flip("elsewhere")}
	in, modes := pools, []volume.Mode{volume.ModeMount, volume.ModeBlock}
	if s := h.volumes[c.source]; s != nil && !h.flip("any") {
		in, modes = []string{s.pool}, []volume.Mode{s.promise().mode}
	}
	if h.flip("of a size") {
		c.sizes = h.sizes()
	}
	c.pool, c.mode = pick(h, "pool", in...), pick(h, "mode", modes...)
	h.make(c)
}

// mayCopyTo is the answer of the source of a new volume.
func (h *harness) mayCopyTo(c creation) error {
	err := h.mayCopy(c.source, volume.Verify)
	switch {
	case c.elsewhere && errors.Is(err, volume.ErrNotFound):
		return volume.ErrOtherNode
	case err == nil && h.volumes[c.source].record.mode != c.mode:
		return volume.ErrInvalid
	}
	return err
}

// mayCopy says whether a volume or a snapshot can be copied. Files of these pools share no blocks.
func (h *harness) mayCopy(name string, when volume.WhenWritten) error {
	v := h.volumes[name]
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
	case h.writable(v):
		return volume.ErrPrecondition
	}
	return nil
}

// writable reports whether a pod may write to a volume. A device that is published read-only counts too.
func (h *harness) writable(v *modelVolume) bool {
	return slices.ContainsFunc(h.published(v, ""), func(target string) bool {
		return v.record.mode == volume.ModeBlock || !h.targets[target].readOnly
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

func (h *harness) snapshot() {
	name, of := h.mostly("snapshot", snapshots, false), h.mostly("id", ids, true)
	when := pick(h, "when written", volume.Verify, volume.Freeze, volume.Accept)
	made := h.volumes[name] == nil
	want := h.maySnapshot(name, of, when)
	h.awaitTick(of)
	unlock := h.lock(name)
	got, err := h.set.Snapshots().Create(background, pool.SnapshotRequest{ID: id(name), Source: id(of), Way: pool.CopyWay{WhenWritten: when}})
	unlock()
	h.answer(err, want, "snapshot %s of %s, %s", name, of, when)
	if err != nil {
		return
	}
	v := h.volumes[name]
	if made {
		v.record.bytes = min(v.record.bytes, h.held(name, v))
	}
	h.sameSnapshot(name, v, got)
}

// maySnapshot is the answer to the creation of a snapshot. If it is nil the model has the
// snapshot, with the promise that is reserved for it.
func (h *harness) maySnapshot(name, of string, when volume.WhenWritten) error {
	v, source := h.volumes[name], h.volumes[of]
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
	if err := h.mayCopy(of, when); err != nil {
		return err
	}
	rec := *source.record
	rec.origin = origin{of, source.record.bytes}
	if rec.kept && rec.mode == volume.ModeMount { // what it holds is counted: one inode, and then 1 MiB more
		rec.bytes = mib + block
	}
	if rec.bytes > h.available(source.pool) {
		return volume.ErrPrecondition
	}
	h.volumes[name] = &modelVolume{
		pool:   source.pool,
		dir:    &directory{stamp: source.dir.stamp, disk: source.dir.disk},
		record: &rec,
	}
	return nil
}

// held is what a new snapshot is promised at most: what it holds, where that is known.
func (h *harness) held(name string, v *modelVolume) int64 {
	switch {
	case v.record.mode == volume.ModeBlock:
		var st syscall.Stat_t
		must.Succeed(h, syscall.Stat(filepath.Join(h.entry(name, v), v.dir.file()), &st))
		return st.Blocks * 512
	case v.record.kept:
		return inodeShare
	}
	return v.record.bytes
}

func (h *harness) deleteSnapshot() {
	name, want := h.mostly("snapshot", snapshots, true), error(nil)
	if h.volumes[name] == nil {
		want = volume.ErrNotFound
	}
	delete(h.volumes, name)
	unlock := h.lock(name)
	err := h.set.Snapshots().Delete(background, id(name))
	unlock()
	h.answer(err, want, "delete snapshot %s", name)
}

// listSnapshots expects those that have a readable record: of others it is not known of what they are.
func (h *harness) listSnapshots() {
	after, most := pick(h, "after", append([]string{""}, snapshots...)...), pick(h, "most", 1, 2, 10)
	of := pick(h, "of", append([]string{""}, ids...)...)
	want := slices.DeleteFunc(h.sorted(), func(name string) bool {
		v := h.volumes[name]
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
		page, from = h.set.Snapshots().List(background, from, source, most)
		for _, s := range page {
			if len(want) == 0 || s.ID.String() != want[0] {
				h.Fatalf("after %q, of %q, comes %+v, want %v", after, of, s, want)
			}
			h.sameSnapshot(want[0], h.volumes[want[0]], s)
			want = want[1:]
		}
	}
	if len(want) > 0 {
		h.Fatalf("the list of snapshots ends before %v", want)
	}
}

// write changes what is in a volume. What was copied from it, and what it was copied from, has still
// what was there.
func (h *harness) write() {
	name := pick(h, "id", ids...)
	v := h.volumes[name]
	if v == nil || v.dir == nil {
		h.Skip()
	}
	v.dir.stamp = ""
	h.stamp(name, v)
}

// checkSnapshot compares what is reported of one snapshot.
func (h *harness) checkSnapshot(name string, v *modelVolume) {
	got, err := h.set.Snapshots().Find(background, id(name))
	if !v.promised() {
		h.answer(err, volume.ErrDamagedRecord, "find snapshot %s", name)
		return
	}
	must.Succeed(h, err)
	h.sameSnapshot(name, v, got)
}

func (h *harness) sameSnapshot(name string, v *modelVolume, got pool.Snapshot) {
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
		h.Fatalf("snapshot (-want +got):\n%s", diff)
	}
}

// awaitTick waits until what changes gets another ctime than what has changed so far on the pool
// of a source, which a copy would take for a change under its eyes.
func (h *harness) awaitTick(source string) {
	v := h.volumes[source]
	if v == nil {
		return
	}
	name := h.out(v.pool, ".hostpath-tick")
	var first, now syscall.Stat_t
	for first.Ctim == now.Ctim {
		must.Succeed(h, os.WriteFile(name, nil, 0o600))
		if must.Succeed(h, syscall.Stat(name, &now)); first.Ino == 0 {
			first = now
		}
	}
	must.Succeed(h, os.Remove(name))
}
