package ledger

import (
	"maps"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// An index has all volumes of a pool. The zero value is empty.
type index struct {
	infos map[volume.ID]Info
	// order has the ids for listings, sorted. It is nil until the first of them: a load puts many
	// volumes before that.
	order []volume.ID
	// promised is the sum of all promises, with what their volumes may take besides, and overhead that part of it.
	promised, overhead int64
	// exceeding is how many volumes may take more than they owe.
	exceeding int
	// option is the pool option bytesPerInode.
	option int64
	costs  Costs
	// snapshots are those among the volumes.
	snapshots SnapshotSum
}

// A SnapshotSum describes the snapshots of a pool.
type SnapshotSum struct {
	Count int
	// Lost are those whose directory is missing, or whose record cannot be read.
	Lost     int
	Promised int64 // bytes
	// PointInTime, CrashConsistent and Unverified are those that have a readable record.
	PointInTime, CrashConsistent, Unverified int
}

// add counts a volume, or takes it out again.
func (s *SnapshotSum) add(c Info, sign int) {
	if !c.Is(IsSnapshot) || !c.Exists() {
		return
	}
	s.Count += sign
	s.Promised += int64(sign) * c.Promised
	if c.Lost() || !c.Recorded() {
		s.Lost += sign
	}
	if !c.Recorded() {
		return
	}
	switch c.Consistency() {
	case volume.PointInTime:
		s.PointInTime += sign
	case volume.CrashConsistent:
		s.CrashConsistent += sign
	case volume.Unverified:
		s.Unverified += sign
	}
}

func (x *index) len() int { return len(x.infos) }

// get returns the zero Info for a volume that is not there.
func (x *index) get(id volume.ID) Info { return x.infos[id] }

// put stores what is known of a volume, or removes it if nothing is left of the volume. It returns by how
// much the promises change.
func (x *index) put(id volume.ID, c Info) (promised int64) {
	before := x.promised
	if id.IsSnapshot() {
		c.flags |= IsSnapshot
	}
	if old, there := x.infos[id]; there {
		x.snapshots.add(old, -1)
		x.sum(old, -1)
	}
	if c.Exists() {
		x.snapshots.add(c, 1)
		x.sum(c, 1)
		x.store(id, c)
	} else {
		x.remove(id)
	}
	return x.promised - before
}

// sum counts what a volume owes, or takes it out again.
func (x *index) sum(c Info, sign int64) {
	overhead := c.overhead(x.option, x.costs)
	x.promised += sign * (c.Promised + overhead)
	x.overhead += sign * overhead
	if c.mayExceed() {
		x.exceeding += int(sign)
	}
}

func (x *index) store(id volume.ID, c Info) {
	if x.infos == nil {
		x.infos = make(map[volume.ID]Info)
	}
	x.infos[id] = c
	if x.order == nil {
		return
	}
	if at, found := x.find(id); !found {
		x.order = slices.Insert(x.order, at, id)
	}
}

func (x *index) remove(id volume.ID) {
	delete(x.infos, id)
	if at, found := x.find(id); found {
		x.order = slices.Delete(x.order, at, at+1)
	}
}

// find returns where a volume is in the order, or would be.
func (x *index) find(id volume.ID) (at int, found bool) {
	return slices.BinarySearchFunc(x.order, id, volume.ID.Compare)
}

// A Volume is an id with what is known of its volume.
type Volume struct {
	ID   volume.ID
	Info Info
}

// chunk is how many volumes are copied while the mutex is held, at most, so that calls wait
// for a walk over all volumes no longer than for this.
const chunk = 256

// after copies the volumes that follow an id, up to most of them and chunk; the zero id
// comes before all.
func (x *index) after(id volume.ID, most int) []Volume {
	if x.order == nil {
		x.order = slices.SortedFunc(maps.Keys(x.infos), volume.ID.Compare)
	}
	at, found := x.find(id)
	if found {
		at++
	}
	following := x.order[at:]
	following = following[:max(0, min(most, chunk, len(following)))]
	listed := make([]Volume, len(following))
	for i, id := range following {
		listed[i] = Volume{id, x.infos[id]}
	}
	return listed
}
