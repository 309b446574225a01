package ledger

import (
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// trash is what was removed and is not erased yet. The mutex of the Ledger guards it.
type trash struct {
	pieces map[string]*piece
	// waiting has the names as they came, and stuck those of the pieces that could not be
	// erased.
	waiting, stuck queue
	// bytes is what those pieces hold of which it is known, and unmeasured how many others
	// there are.
	bytes      int64
	unmeasured int
}

// piece is an entry of the trash directory that is not erased yet.
type piece struct {
	promised int64 // bytes that the ledger keeps for it, or volume.Unknown
	holds    int64 // bytes that it occupies, or volume.Unknown
	since    time.Time
	err      error     // why it could not be removed; nil if that was not tried
	logged   time.Time // when it was last logged that what it occupies cannot be counted
	most     int64     // the most that it occupied, in bytes, as far as is known
	removed  bool      // it was a volume or a snapshot, and not an attempt to make one
	family   string    // whose blocks it shares, if it was removed; empty for none
	// id is what it was counted by, once that is known: it is to be given back also
	// when nothing is left of the tree.
	id quota.ID
	at uint64 // its number in waiting, or in stuck if there is an err
}

// mayLeave is how much others may have of what a piece held once it is erased, in bytes.
func (p *piece) mayLeave() int64 {
	if p.promised == volume.Unknown {
		return p.most
	}
	return p.promised
}

// add takes a piece in, unless it is known.
func (t *trash) add(name string, promised int64, now time.Time) bool {
	if _, known := t.pieces[name]; known {
		return false
	}
	if t.pieces == nil {
		t.pieces = make(map[string]*piece)
	}
	t.pieces[name] = &piece{promised: promised, holds: volume.Unknown, since: now, at: t.waiting.add(name)}
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
	r.holds, r.most = bytes, max(r.most, bytes)
	t.count(r, 1)
}

// uncounted is what a piece occupied at last, or volume.Unknown, and whether it is time to
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
		t.stuck.remove(r.at)
	} else {
		t.waiting.remove(r.at)
	}
	if r.err = err; err != nil {
		r.at = t.stuck.add(name)
		return
	}
	t.count(r, -1)
	delete(t.pieces, name)
}

// A queue has names by ascending numbers, from which any can be removed.
type queue struct {
	first uint64   // the number of names[0]
	names []string // an empty one was removed, and is never the first
	count int      // of those that were not
}

func (q *queue) add(name string) (number uint64) {
	q.names = append(q.names, name)
	q.count++
	return q.end() - 1
}

// end is the number of the next name.
func (q *queue) end() uint64 { return q.first + uint64(len(q.names)) }

func (q *queue) remove(number uint64) {
	q.names[number-q.first] = ""
	q.count--
	for len(q.names) > 0 && q.names[0] == "" {
		q.names, q.first = q.names[1:], q.first+1
	}
}

// page copies names with numbers from from and below end, of at most chunk numbers, and answers the
// number to go on with.
func (q *queue) page(from, end uint64) (names []string, next uint64) {
	from = max(from, q.first)
	next = min(from+chunk, max(from, end))
	for number := from; number < next; number++ {
		if name := q.names[number-q.first]; name != "" {
			names = append(names, name)
		}
	}
	return names, next
}

// A TrashSum describes the trash as a whole.
type TrashSum struct {
	Pieces, Stuck int
	Bytes         int64     // what it occupies, or volume.Unknown
	Since         time.Time // of the oldest piece that is not stuck; the zero time if there is none
}

func (t *trash) sum() TrashSum {
	sum := TrashSum{Pieces: len(t.pieces), Stuck: t.stuck.count, Bytes: t.bytes}
	if t.unmeasured > 0 {
		sum.Bytes = volume.Unknown
	}
	if t.waiting.count > 0 {
		sum.Since = t.pieces[t.waiting.names[0]].since
	}
	return sum
}

// RetryStuck is when trash that could not be erased is tried again.
const RetryStuck = time.Hour

// Trash is what was removed and is not erased yet.
type Trash struct{ ledger *Ledger }

// Trash is that of the pool.
func (l *Ledger) Trash() Trash { return Trash{l} }

// Throw queues a piece of trash to be erased, and keeps its promise until then: bytes, or
// volume.Unknown. It returns false for a piece that is queued already.
func (t Trash) Throw(name string, promised int64) bool {
	t.ledger.mu.Lock()
	defer t.ledger.unlock()
	return t.queue(name, promised)
}

// ThrowFound queues a piece that was found in the trash when Erased answered that number. If
// any piece was erased since, it may be that one; if it is not, it will be found again.
func (t Trash) ThrowFound(name string, bytes int64, erased uint64) bool {
	t.ledger.mu.Lock()
	defer t.ledger.unlock()
	return t.ledger.erased == erased && t.queue(name, bytes)
}

func (t Trash) queue(name string, promised int64) bool {
	if !t.ledger.trash.add(name, promised, time.Now()) {
		return false
	}
	t.ledger.sums.addTrash(promised)
	t.Wake()
	return true
}

// Wake has what waits for Queued look at the trash again.
func (t Trash) Wake() {
	select {
	case t.ledger.reap <- struct{}{}:
	default: // it will
	}
}

// Queued has a token once there is trash to erase, or after Wake.
func (t Trash) Queued() <-chan struct{} { return t.ledger.reap }

// Erased is how many pieces of trash were erased so far.
func (t Trash) Erased() uint64 {
	t.ledger.mu.Lock()
	defer t.ledger.mu.Unlock()
	return t.ledger.erased
}

// Has reports whether a piece of trash is queued, or could not be erased.
func (t Trash) Has(name string) bool {
	t.ledger.mu.Lock()
	defer t.ledger.mu.Unlock()
	_, known := t.ledger.trash.pieces[name]
	return known
}

// Names are those of what is to be erased, the oldest first, and after that what is stuck, if that is
// asked for too. What comes or fails meanwhile may be missing.
func (t Trash) Names(stuckToo bool) (names []string) {
	t.ledger.mu.Lock()
	waiting, stuck := t.ledger.trash.waiting.end(), t.ledger.trash.stuck.end()
	t.ledger.mu.Unlock()
	names = t.queued(nil, &t.ledger.trash.waiting, waiting)
	if stuckToo {
		names = t.queued(names, &t.ledger.trash.stuck, stuck)
	}
	return names
}

// queued appends the names below a number, in pages.
func (t Trash) queued(names []string, q *queue, end uint64) []string {
	for next := uint64(0); next < end; {
		var page []string
		t.ledger.mu.Lock()
		page, next = q.page(next, end)
		t.ledger.mu.Unlock()
		names = append(names, page...)
	}
	return names
}

// ID remembers the project id that counts a piece of trash, and returns the one that is
// remembered. 0 stands for none.
func (t Trash) ID(name string, id quota.ID) quota.ID {
	t.ledger.mu.Lock()
	defer t.ledger.mu.Unlock()
	p := t.ledger.trash.pieces[name]
	if p == nil {
		return id // erased before
	}
	if id != 0 {
		p.id = id
	}
	return p.id
}

// Measured notes how many bytes a piece of trash occupies.
func (t Trash) Measured(name string, bytes int64) {
	t.ledger.mu.Lock()
	defer t.ledger.unlock()
	t.ledger.trash.measured(name, bytes)
}

// Unmeasured returns what a piece of trash occupied when it was last measured, or
// volume.Unknown, and whether it is time to report that it cannot be measured now.
func (t Trash) Unmeasured(name string) (last int64, report bool) {
	t.ledger.mu.Lock()
	defer t.ledger.mu.Unlock()
	return t.ledger.trash.uncounted(name, time.Now())
}

// Holds notes what a piece of trash occupies of which no promise is known, in bytes.
func (t Trash) Holds(name string, bytes int64) {
	t.ledger.mu.Lock()
	defer t.ledger.unlock()
	if p := t.ledger.trash.pieces[name]; p != nil && p.promised == volume.Unknown {
		t.ledger.sums.dropTrash(p.promised)
		p.promised = bytes
		t.ledger.sums.addTrash(bytes)
	}
}

// Promise is the promise of a piece of trash, in bytes, or volume.Unknown. One that is not
// there has none.
func (t Trash) Promise(name string) int64 {
	t.ledger.mu.Lock()
	defer t.ledger.mu.Unlock()
	if p := t.ledger.trash.pieces[name]; p != nil {
		return p.promised
	}
	return 0
}

// Removed notes that a piece of trash is what was removed, as its user asked, and the family that its record had. Of one from before a
// start that is not known.
func (t Trash) Removed(name, family string) {
	t.ledger.mu.Lock()
	defer t.ledger.mu.Unlock()
	if p := t.ledger.trash.pieces[name]; p != nil {
		p.removed, p.family = true, family
	}
}

// Family is the family with which a piece of trash shares blocks; empty for none.
func (t Trash) Family(name string) (family string, known bool) {
	t.ledger.mu.Lock()
	defer t.ledger.mu.Unlock()
	if p := t.ledger.trash.pieces[name]; p != nil {
		return p.family, p.removed
	}
	return "", false
}

// Left reports whether a piece of trash may be what a failed creation left, and why it could not be erased when that
// was last tried; nil for one that waits for its turn.
func (t Trash) Left(name string) (left bool, failed error) {
	t.ledger.mu.Lock()
	defer t.ledger.mu.Unlock()
	if p := t.ledger.trash.pieces[name]; p != nil {
		return !p.removed, p.err
	}
	return false, nil
}

// Tried notes how an attempt to erase a piece ended. The promise of an erased piece ends.
func (t Trash) Tried(name string, err error) {
	t.ledger.mu.Lock()
	defer t.ledger.unlock()
	if p := t.ledger.trash.pieces[name]; p != nil && err == nil {
		t.ledger.on.keep(p.mayLeave())
		t.ledger.sums.dropTrash(p.promised)
		t.ledger.erased++
	}
	t.ledger.trash.tried(name, err)
}
