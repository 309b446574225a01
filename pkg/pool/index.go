package pool

import (
	"slices"
	"strings"
)

// An entry is what is known of one volume without looking at the disk.
type entry struct {
	record *record // nil for a directory that came without one
	// present tells whether the directory is there.
	present bool
	// damage is why the record cannot be read; nil if it can, or if there is none.
	damage error
}

// exists tells whether there is anything of the volume at all.
func (e entry) exists() bool { return e.present || e.record != nil || e.damage != nil }

// lost tells of a promise whose directory is gone.
func (e entry) lost() bool { return !e.present }

// promised is the size set aside, in bytes.
func (e entry) promised() int64 {
	if e.record == nil {
		return 0
	}
	return e.record.Bytes
}

// mode is how the volume is used. A directory without a record is one.
func (e entry) mode() Mode {
	if e.record == nil {
		return ModeMount
	}
	return e.record.Mode
}

// block tells whether the volume is a block device.
func (e entry) block() bool { return e.mode() == ModeBlock }

// mayBeBlock tells whether the volume is, or may have been made as, a block device:
// that of a damaged record, or of one that was removed, cannot be told.
func (e entry) mayBeBlock() bool { return e.record == nil || e.block() }

// inline tells whether the volume goes when it is unpublished.
func (e entry) inline() bool { return e.record != nil && e.record.Inline }

// index is all volumes of a pool in the order of their ids.
type index struct {
	byID  map[VolumeID]entry
	order []VolumeID
}

func newIndex() index { return index{byID: make(map[VolumeID]entry)} }

func compareIDs(a, b VolumeID) int { return strings.Compare(a.name, b.name) }

// put stores an entry, or removes it if nothing is left of the volume. It answers
// by how much the promises change.
func (x *index) put(id VolumeID, e entry) (promised int64) {
	old, had := x.byID[id]
	at, found := slices.BinarySearchFunc(x.order, id, compareIDs)
	switch {
	case e.exists() && !found:
		x.order = slices.Insert(x.order, at, id)
	case !e.exists() && had:
		x.order = slices.Delete(x.order, at, at+1)
	}
	if e.exists() {
		x.byID[id] = e
	} else {
		delete(x.byID, id)
	}
	return e.promised() - old.promised()
}

// fill replaces everything at once.
func (x *index) fill(entries map[VolumeID]entry) (promised int64) {
	x.byID = entries
	x.order = make([]VolumeID, 0, len(entries))
	for id, e := range entries {
		x.order = append(x.order, id)
		promised += e.promised()
	}
	slices.SortFunc(x.order, compareIDs)
	return promised
}

// after is up to most ids that follow one; the zero id comes before all.
func (x *index) after(id VolumeID, most int) []VolumeID {
	at, found := slices.BinarySearchFunc(x.order, id, compareIDs)
	if found {
		at++
	}
	rest := x.order[at:]
	return slices.Clone(rest[:min(most, len(rest))])
}

// promised is the sum of all promises in the index.
func (x *index) promised() (sum int64) {
	for _, e := range x.byID {
		sum += e.promised()
	}
	return sum
}
