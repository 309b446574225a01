package ledger

import (
	"slices"
	"sort"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// An index is all volumes of a pool in the order of their ids. It is made to be small, for
// most of the memory of a driver with many volumes is this: ids and cards lie side by side
// in pages, without a pointer for each, and are copied in and out. Finding, putting and
// listing take time that grows with the logarithm of how many there are. The zero value is
// empty.
type index struct {
	pages []page // in order; none is empty
	count int
	// promised is the sum of all promises, with what their inodes may take, and overhead the
	// part of it that is for those.
	promised, overhead int64
	// option is the pool option bytesPerInode, and inodeBytes what an inode takes.
	option, inodeBytes int64
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

// add counts a card, or takes it out again.
func (s *SnapshotSum) add(c Card, sign int) {
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

// A page has some volumes that follow each other.
type page struct {
	first string   // id: so that finding a page reads no others
	ids   []byte   // one after the other
	ends  []uint16 // of each in ids
	cards []Card
}

// pageSize is how many volumes a page has at most. The longest ids then have 12,800 bytes,
// which a number of ends can hold.
const pageSize = 64

func (x *index) len() int { return x.count }

// get returns the zero card for a volume that is not there.
func (x *index) get(id volume.ID) Card {
	if c := x.at(id); c != nil {
		return *c
	}
	return Card{}
}

// at is the card in its place, until the next put; nil if there is none.
func (x *index) at(id volume.ID) *Card {
	n := x.page(id)
	if n == len(x.pages) {
		return nil
	}
	at, found := x.pages[n].find(id)
	if !found {
		return nil
	}
	return &x.pages[n].cards[at]
}

// page is where a volume is, or would be put. Only without any volumes is there none.
func (x *index) page(id volume.ID) int {
	return max(0, sort.Search(len(x.pages), func(i int) bool { return x.pages[i].first > id.String() })-1)
}

// put stores a card, or removes it if nothing is left of the volume. It returns by how
// much the promises change.
func (x *index) put(id volume.ID, c Card) (promised int64) {
	before := x.promised
	if id.IsSnapshot() {
		c.flags |= IsSnapshot
	}
	x.snapshots.add(c, 1)
	if old := x.at(id); old != nil {
		x.snapshots.add(*old, -1)
		x.sum(*old, -1)
		if c.Exists() {
			*old = c
			x.sum(c, 1)
		} else {
			x.remove(id)
		}
	} else if c.Exists() {
		x.insert(id, c)
		x.sum(c, 1)
	}
	return x.promised - before
}

// sum counts what a volume owes, or takes it out again.
func (x *index) sum(c Card, sign int64) {
	overhead := c.overhead(x.option, x.inodeBytes)
	x.promised += sign * (c.Promised + overhead)
	x.overhead += sign * overhead
}

func (x *index) insert(id volume.ID, c Card) {
	n := x.page(id)
	if n == len(x.pages) {
		x.pages = []page{{}}
	}
	if len(x.pages[n].cards) == pageSize {
		x.pages = slices.Insert(x.pages, n+1, x.pages[n].split())
		n = x.page(id)
	}
	p := &x.pages[n]
	at, _ := p.find(id)
	p.insert(at, id, c)
	x.count++
}

// remove takes out a volume that is there. Pages that become small are put together, so
// that a pool does not keep the memory of what it once had.
func (x *index) remove(id volume.ID) {
	n := x.page(id)
	p := &x.pages[n]
	at, _ := p.find(id)
	p.remove(at)
	x.count--
	if len(p.cards) == 0 {
		x.pages = slices.Delete(x.pages, n, n+1)
		return
	}
	for _, first := range []int{n, n - 1} {
		if first >= 0 && first+1 < len(x.pages) && x.pages[first].join(&x.pages[first+1]) {
			x.pages = slices.Delete(x.pages, first+1, first+2)
			return
		}
	}
}

// A Volume is an id with the card of its volume.
type Volume struct {
	ID   volume.ID
	Card Card
}

// chunk is how many cards are copied while the mutex is held, at most, so that calls wait
// for a walk over all volumes no longer than for this.
const chunk = 256

// after copies the volumes that follow an id, up to most of them and chunk; the zero id
// comes before all.
func (x *index) after(id volume.ID, most int) []Volume {
	most = min(most, chunk, x.count)
	if most <= 0 {
		return nil
	}
	found := make([]Volume, 0, most)
	for n := x.page(id); n < len(x.pages); n++ {
		p := &x.pages[n]
		for at := range p.cards {
			if len(found) == most {
				return found
			}
			if string(p.id(at)) > id.String() {
				next, _ := volume.ParseEntry(string(p.id(at))) // it was one when it was put
				found = append(found, Volume{next, p.cards[at]})
			}
		}
	}
	return found
}

// mark notes on a card that something of the volume was seen, until it is put again. It
// returns false for a volume that is not there.
func (x *index) mark(id volume.ID, saw Flags) bool {
	c := x.at(id)
	if c == nil {
		return false
	}
	c.flags |= saw
	return true
}

// unmark removes the marks of a few pages, beginning with the one of an id. It returns the
// id to go on with, until it returns false.
func (x *index) unmark(from volume.ID) (next volume.ID, more bool) {
	for n, first := x.page(from), x.page(from); n < len(x.pages); n++ {
		p := &x.pages[n]
		if n-first == chunk/pageSize {
			next, _ = volume.ParseEntry(p.first)
			return next, true
		}
		for at := range p.cards {
			p.cards[at].flags &^= sawDirectory | sawRecord
		}
	}
	return volume.ID{}, false
}

// id is valid until the page changes.
func (p *page) id(at int) []byte { return p.ids[p.start(at):p.ends[at]] }

func (p *page) start(at int) uint16 {
	if at == 0 {
		return 0
	}
	return p.ends[at-1]
}

// find returns where a volume is, or would be put.
func (p *page) find(id volume.ID) (at int, found bool) {
	at = sort.Search(len(p.cards), func(i int) bool { return string(p.id(i)) >= id.String() })
	return at, at < len(p.cards) && string(p.id(at)) == id.String()
}

func (p *page) insert(at int, id volume.ID, c Card) {
	start, length := p.start(at), uint16(len(id.String()))
	p.ids = append(withRoom(p.ids, len(id.String())), id.String()...)
	copy(p.ids[start+length:], p.ids[start:])
	copy(p.ids[start:], id.String())
	p.ends = slices.Insert(withRoom(p.ends, 1), at, start)
	for i := at; i < len(p.ends); i++ {
		p.ends[i] += length
	}
	p.cards = slices.Insert(withRoom(p.cards, 1), at, c)
	if at == 0 {
		p.first = id.String()
	}
}

func (p *page) remove(at int) {
	start, end := p.start(at), p.ends[at]
	p.ids = slices.Delete(p.ids, int(start), int(end))
	p.ends = slices.Delete(p.ends, at, at+1)
	for i := at; i < len(p.ends); i++ {
		p.ends[i] -= end - start
	}
	p.cards = slices.Delete(p.cards, at, at+1)
	if at == 0 && len(p.cards) > 0 {
		p.first = string(p.id(0))
	}
}

// split leaves the first half of a page in it, and returns the other.
func (p *page) split() page {
	both, first, second := *p, page{}, page{}
	half := len(both.cards) / 2
	first.add(&both, 0, half)
	second.add(&both, half, len(both.cards))
	*p = first
	return second
}

// join adds the page that follows, if both together have room to grow.
func (p *page) join(next *page) bool {
	if len(p.cards)+len(next.cards) > pageSize/2 {
		return false
	}
	p.add(next, 0, len(next.cards))
	return true
}

// add appends the volumes of another page from one to before another.
func (p *page) add(of *page, from, to int) {
	if len(p.cards) == 0 {
		p.first = string(of.id(from))
	}
	begin, ids := of.start(from), uint16(len(p.ids))
	added := of.ids[begin:of.start(to)]
	p.ids = append(withRoom(p.ids, len(added)), added...)
	p.cards = append(withRoom(p.cards, to-from), of.cards[from:to]...)
	p.ends = withRoom(p.ends, to-from)
	for _, end := range of.ends[from:to] {
		p.ends = append(p.ends, ids+end-begin)
	}
}

// withRoom is a slice with room for so many more, and an eighth besides. What append does
// by itself leaves half of a page empty.
func withRoom[E any](s []E, more int) []E {
	if cap(s)-len(s) >= more {
		return s
	}
	return append(make([]E, 0, (len(s)+more)*9/8), s...)
}
