package pool

import (
	"container/list"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// trash is what was removed and is not erased yet. The pool's mutex guards it.
type trash struct {
	pieces map[string]*rubbish
	// waiting has the names as they came, and stuck those of the pieces that could not be
	// erased.
	waiting, stuck list.List
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
	err      error     // why it could not be removed; nil if that was not tried
	told     time.Time // when it was told that what it occupies cannot be counted
	// id is what it was counted by, once that is known: it is to be given back also
	// when nothing is left of the tree.
	id quota.ID
	at *list.Element // of waiting, or of stuck if there is an err
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
	t.pieces[name] = &rubbish{promised: promised, holds: unknownBytes, since: now, at: t.waiting.PushBack(name)}
	t.unmeasured++
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

// uncounted is what a piece occupied at last, or unknownBytes, and whether it is time to
// tell that this cannot be counted any more.
func (t *trash) uncounted(name string, now time.Time) (last int64, tell bool) {
	r := t.pieces[name]
	if r == nil {
		return unknownBytes, false // erased meanwhile
	}
	if tell = now.Sub(r.told) >= retryStuck; tell {
		r.told = now
	}
	return r.holds, tell
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
	if r == nil {
		return // erased before
	}
	if r.err != nil {
		t.stuck.Remove(r.at)
	} else {
		t.waiting.Remove(r.at)
	}
	if r.err = err; err != nil {
		r.at = t.stuck.PushBack(name)
		return
	}
	t.count(r, -1)
	delete(t.pieces, name)
}

// queued are the pieces to be erased, the oldest first, and after them those that are stuck.
func (t *trash) queued(stuckToo bool) []string {
	queued := namesIn(&t.waiting)
	if stuckToo {
		queued = append(queued, namesIn(&t.stuck)...)
	}
	return queued
}

func namesIn(l *list.List) (names []string) {
	for e := l.Front(); e != nil; e = e.Next() {
		names = append(names, e.Value.(string))
	}
	return names
}

// A trashSum is what is shown of the trash.
type trashSum struct {
	pieces, stuck int
	holds         int64     // bytes, or unknownBytes
	since         time.Time // of the oldest piece that is not stuck; the zero time if there is none
}

func (t *trash) sum() trashSum {
	sum := trashSum{pieces: len(t.pieces), stuck: t.stuck.Len(), holds: t.bytes}
	if t.unmeasured > 0 {
		sum.holds = unknownBytes
	}
	if oldest := t.waiting.Front(); oldest != nil {
		sum.since = t.pieces[oldest.Value.(string)].since
	}
	return sum
}
