package pool

import (
	"fmt"
	"iter"
	"math/bits"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// ledger counts what a pool owes, in bytes. The pool's mutex guards it, so that a
// check and the reservation that follows from it are one step.
type ledger struct {
	// promised is the sum over all records and all creations under way.
	promised int64
	// trashed is the sum of the promises of volumes that are being removed: what
	// they still occupy is not sold again before it is free.
	trashed int64
	// unknown is how many pieces of trash have a size that nobody knows.
	unknown int
	// others: other nodes have trash in the pool.
	others bool
	// foreign is what others have taken, as far as it is known.
	foreign int64
}

// available is what can still be promised:
//
//	min(free, size × overprovision − Σ promised − foreign use) − reserve
//
// Without quotas nobody knows what the volumes hold, and so what the others hold:
// that is at least what exceeds all promises, and was once known exactly.
func (l *ledger) available(space dir.Space, config Config) int64 {
	if space.ReadOnly || space.OutOfInodes() {
		return 0
	}
	taken := space.TakenBytes()
	foreign := min(taken, max(l.foreign+l.trashed, taken-l.promised))
	if l.unknown > 0 || l.others {
		foreign = taken
	}
	sellable := space.SizeBytes
	if config.Overprovision != 1 {
		sellable = int64(float64(space.SizeBytes) * config.Overprovision)
	}
	left := min(space.FreeBytes, sellable-l.promised-foreign)
	return max(0, left-config.Reserve.of(space.SizeBytes))
}

// told is what is available as it is told: rounded down.
func (l *ledger) told(space dir.Space, config Config) int64 {
	step := quantum(space.SizeBytes)
	return l.available(space, config) / step * step
}

func (l *ledger) addTrash(promised int64) {
	if promised == unknownBytes {
		l.unknown++
	} else {
		l.trashed += promised
	}
}

func (l *ledger) dropTrash(promised int64) {
	if promised == unknownBytes {
		l.unknown--
	} else {
		l.trashed -= promised
	}
}

// quantum is the step in which capacity is told: about a thousandth of the pool,
// from 1 to 64 MiB. The object that carries the answer is rewritten whenever the
// number changes at all.
func quantum(size int64) int64 {
	step := int64(1) << bits.Len64(uint64(size/1000))
	return max(1<<20, min(step, 64<<20))
}

// A reservation is of bytes that are set aside for what a call is making. Whatever becomes of
// the call, it is released in the end: also by a panic, which ends no more than the call.
type reservation struct {
	pool    *Pool
	bytes   int64
	settled bool
}

// reserve sets bytes aside, if they fit. They are held until commit or release.
func (p *Pool) reserve(space dir.Space, bytes int64) (*reservation, error) {
	p.mu.Lock()
	defer p.unlock()
	if space.OutOfInodes() {
		return nil, fmt.Errorf("%w: the filesystem of pool %q has no inode left", ErrNoSpace, p.config.Name)
	}
	if available := p.ledger.available(space, p.config); bytes > available {
		return nil, fmt.Errorf("%w: pool %q has %d bytes to promise, %d are asked for", ErrNoSpace, p.config.Name, available, bytes)
	}
	p.ledger.promised += bytes
	return &reservation{pool: p, bytes: bytes}, nil
}

// release gives the bytes back, and tells whether they were still held.
func (r *reservation) release() bool {
	r.pool.mu.Lock()
	defer r.pool.unlock()
	return r.settle()
}

// commit turns the bytes into what the index has of a volume.
func (r *reservation) commit(id VolumeID, e entry) {
	r.pool.mu.Lock()
	defer r.pool.unlock()
	r.pool.put(id, e)
	r.settle()
}

func (r *reservation) settle() bool {
	if r.settled {
		return false
	}
	r.settled = true
	r.pool.ledger.promised -= r.bytes
	return true
}

// note brings index and ledger in line with what is on disk.
func (p *Pool) note(id VolumeID, e entry) {
	p.mu.Lock()
	defer p.unlock()
	p.put(id, e)
}

// put also tells the loads that are being made, where nothing changes too: they may have read
// a record that was there for a moment.
func (p *Pool) put(id VolumeID, e entry) {
	p.ledger.promised += p.index.put(id, e.card())
	for _, l := range p.loads {
		l.told[id] = struct{}{}
	}
}

// known is what the index has of a volume.
func (p *Pool) known(id VolumeID) card {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.index.get(id)
}

// after is up to most volumes that follow an id and whose cards are asked for; the zero id
// comes before all.
func (p *Pool) after(id VolumeID, most int, which func(card) bool) []VolumeID {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.index.after(id, most, which)
}

// any tells whether there is a volume whose card is asked for.
func (p *Pool) any(which func(card) bool) bool { return len(p.after(VolumeID{}, 1, which)) > 0 }

// each goes over the volumes whose cards are asked for, in the order of their ids. No lock
// is held while one is worked on, and of a large pool only some are remembered.
func (p *Pool) each(which func(card) bool) iter.Seq2[VolumeID, card] {
	const some = 256
	return func(yield func(VolumeID, card) bool) {
		for ids := p.after(VolumeID{}, some, which); len(ids) > 0; ids = p.after(ids[len(ids)-1], some, which) {
			for _, id := range ids {
				if c := p.known(id); which(c) && !yield(id, c) {
					return
				}
			}
		}
	}
}

// free is the capacity of the pool, rounded down; 0 while it does not serve.
func (p *Pool) free() int64 {
	s, err := p.enter()
	if err != nil {
		return 0
	}
	defer s.close()
	if err := s.loadShared(); err != nil {
		return 0
	}
	space, err := s.space()
	if err != nil {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ledger.told(space, p.config)
}
