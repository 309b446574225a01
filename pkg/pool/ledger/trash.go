package ledger

import (
	"container/list"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// trash is what was removed and is not erased yet. The mutex of the Ledger guards it.
type trash struct {
	pieces map[string]*piece
	// waiting has the names as they came, and stuck those of the pieces that could not be
	// erased.
	waiting, stuck list.List
	// bytes is what those pieces hold of which it is known, and unmeasured how many others
	// there are.
	bytes      int64
	unmeasured int
}

// piece is an entry of the trash directory that is not erased yet.
type piece struct {
	promised int64 // bytes that the ledger keeps for it, or unknownBytes
	holds    int64 // bytes that it occupies, or unknownBytes
	since    time.Time
	err      error     // why it could not be removed; nil if that was not tried
	logged   time.Time // when it was last logged that what it occupies cannot be counted
	// id is what it was counted by, once that is known: it is to be given back also
	// when nothing is left of the tree.
	id quota.ID
	at *list.Element // of waiting, or of stuck if there is an err
}

// add takes a piece in, unless it is known.
func (t *trash) add(name string, promised int64, now time.Time) bool {
	if _, known := t.pieces[name]; known {
		return false
	}
	if t.pieces == nil {
		t.pieces = make(map[string]*piece)
	}
	t.pieces[name] = &piece{promised: promised, holds: volume.Unknown, since: now, at: t.waiting.PushBack(name)}
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
// report that this cannot be counted any more.
func (t *trash) uncounted(name string, now time.Time) (last int64, report bool) {
	r := t.pieces[name]
	if r == nil {
		return volume.Unknown, false // erased meanwhile
	}
	if report = now.Sub(r.logged) >= RetryStuck; report {
		r.logged = now
	}
	return r.holds, report
}

// count adds what a piece occupies to the sums, or takes it from them.
func (t *trash) count(r *piece, sign int) {
	if r.holds == volume.Unknown {
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

// A TrashSum describes the trash as a whole.
type TrashSum struct {
	Pieces, Stuck int
	Bytes         int64     // what it occupies, or volume.Unknown
	Since         time.Time // of the oldest piece that is not stuck; the zero time if there is none
}

func (t *trash) sum() TrashSum {
	sum := TrashSum{Pieces: len(t.pieces), Stuck: t.stuck.Len(), Bytes: t.bytes}
	if t.unmeasured > 0 {
		sum.Bytes = volume.Unknown
	}
	if oldest := t.waiting.Front(); oldest != nil {
		sum.Since = t.pieces[oldest.Value.(string)].since
	}
	return sum
}

// RetryStuck is when trash that could not be erased is tried again.
const RetryStuck = time.Hour

// Throw queues a piece of trash to be erased, and keeps its promise until then: bytes, or
// volume.Unknown. It answers false for a piece that is queued already.
func (l *Ledger) Throw(name string, promised int64) bool {
	l.mu.Lock()
	defer l.unlock()
	return l.queue(name, promised)
}

// ThrowFound queues a piece that was found in the trash when Erased answered that number. If
// any piece was erased since, it may be that one; if it is not, it will be found again.
func (l *Ledger) ThrowFound(name string, bytes int64, erased uint64) bool {
	l.mu.Lock()
	defer l.unlock()
	return l.erased == erased && l.queue(name, bytes)
}

func (l *Ledger) queue(name string, promised int64) bool {
	if !l.trash.add(name, promised, time.Now()) {
		return false
	}
	l.sums.addTrash(promised)
	return true
}

// Erased is how many pieces of trash were erased so far.
func (l *Ledger) Erased() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.erased
}

// HasTrash reports whether a piece of trash is queued, or could not be erased.
func (l *Ledger) HasTrash(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, known := l.trash.pieces[name]
	return known
}

// Trash is what is to be erased, the oldest first, and after that what is stuck, if that is
// asked for too.
func (l *Ledger) Trash(stuckToo bool) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.trash.queued(stuckToo)
}

// TrashID remembers the project id that counts a piece of trash, and answers the one that is
// remembered. 0 stands for none.
func (l *Ledger) TrashID(name string, id quota.ID) quota.ID {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.trash.pieces[name]
	if p == nil {
		return id // erased before
	}
	if id != 0 {
		p.id = id
	}
	return p.id
}

// TrashMeasured notes how many bytes a piece of trash occupies.
func (l *Ledger) TrashMeasured(name string, bytes int64) {
	l.mu.Lock()
	defer l.unlock()
	l.trash.measured(name, bytes)
}

// TrashUnmeasured answers what a piece of trash occupied when it was last measured, or
// volume.Unknown, and whether it is time to report that it cannot be measured now.
func (l *Ledger) TrashUnmeasured(name string) (last int64, report bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.trash.uncounted(name, time.Now())
}

// TrashHolds notes what a piece of trash occupies of which no promise is known, in bytes.
func (l *Ledger) TrashHolds(name string, bytes int64) {
	l.mu.Lock()
	defer l.unlock()
	if p := l.trash.pieces[name]; p != nil && p.promised == volume.Unknown {
		l.sums.dropTrash(p.promised)
		p.promised = bytes
		l.sums.addTrash(bytes)
	}
}

// TrashPromise is the promise of a piece of trash, in bytes, or volume.Unknown. One that is not
// there has none.
func (l *Ledger) TrashPromise(name string) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.trash.pieces[name]; p != nil {
		return p.promised
	}
	return 0
}

// TrashTried notes how an attempt to erase a piece ended. The promise of an erased piece ends.
func (l *Ledger) TrashTried(name string, err error) {
	l.mu.Lock()
	defer l.unlock()
	if p := l.trash.pieces[name]; p != nil && err == nil {
		l.sums.dropTrash(p.promised)
		l.erased++
	}
	l.trash.tried(name, err)
}
