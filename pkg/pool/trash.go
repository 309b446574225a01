package pool

import (
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// trash is what was removed and is not erased yet. The pool's mutex guards it.
type trash struct {
	pieces map[string]*rubbish
	// order has the names as they came; those of pieces that are gone may be left in it.
	order []string
	// stuck is how many pieces could not be erased.
	stuck int
	// bytes is what those pieces hold of which it is known, and unmeasured how many others
	// there are.
	bytes      int64
	unmeasured int
}

// rubbish is an entry of the trash directory that is not erased yet.
type rubbish struct {
	promised int64 // bytes that the ledger keeps for it, or unknownBytes
	holds    int64 // bytes that it occupies, or unknownBytes
	since    time.Time
	err      error // why it could not be removed; nil if that was not tried
	// id is what it was counted by, once that is known: it is to be given back also
	// when nothing is left of the tree.
	id quota.ID
}

// unknownBytes stands for a size that nobody knows.
const unknownBytes = -1

// add takes a piece in, unless it is known.
func (t *trash) add(name string, promised int64, now time.Time) bool {
	if _, known := t.pieces[name]; known {
		return false
	}
	if t.pieces == nil {
		t.pieces = make(map[string]*rubbish)
	}
	t.pieces[name] = &rubbish{promised: promised, holds: unknownBytes, since: now}
	t.unmeasured++
	t.order = append(t.order, name)
	return true
}

// measured notes what a piece occupies.
func (t *trash) measured(name string, bytes int64) {
	r := t.pieces[name]
	if r == nil {
		return // erased meanwhile
	}
	t.count(r, -1)
	r.holds = bytes
	t.count(r, 1)
}

// count adds what a piece occupies to the sums, or takes it from them.
func (t *trash) count(r *rubbish, sign int) {
	if r.holds == unknownBytes {
		t.unmeasured += sign
	} else {
		t.bytes += int64(sign) * r.holds
	}
}

// tried notes how an attempt to erase a piece ended. One that succeeded is forgotten.
func (t *trash) tried(name string, err error) {
	r := t.pieces[name]
	if r.err != nil {
		t.stuck--
	}
	if r.err = err; err != nil {
		t.stuck++
		return
	}
	t.count(r, -1)
	delete(t.pieces, name)
	// Behind one that is stuck for ever, names would pile up.
	if len(t.order) > 2*len(t.pieces)+burst {
		t.order = t.left()
	}
}

// left are the names of the pieces as they came.
func (t *trash) left() []string {
	left := make([]string, 0, len(t.pieces))
	for _, name := range t.order {
		if _, known := t.pieces[name]; known {
			left = append(left, name)
		}
	}
	return left
}

// queued are the pieces to be erased, the oldest first.
func (t *trash) queued(stuckToo bool) []string {
	var queued []string
	for _, name := range t.left() {
		if t.pieces[name].err == nil || stuckToo {
			queued = append(queued, name)
		}
	}
	return queued
}

// A trashSum is what is shown of the trash.
type trashSum struct {
	pieces, stuck int
	holds         int64 // bytes, or unknownBytes
	since         time.Time
}

func (t *trash) sum() trashSum {
	sum := trashSum{pieces: len(t.pieces), stuck: t.stuck, holds: t.bytes}
	if t.unmeasured > 0 {
		sum.holds = unknownBytes
	}
	for ; len(t.order) > 0; t.order = t.order[1:] {
		if oldest := t.pieces[t.order[0]]; oldest != nil {
			sum.since = oldest.since
			break
		}
	}
	return sum
}
