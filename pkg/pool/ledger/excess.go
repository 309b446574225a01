package ledger

import (
	"iter"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// An Excess is a measuring of what the files of block volumes that share blocks take and do not owe. Together with the promises
// that is no less than what all that share these blocks take: snapshots are not written to, and each has the promise of what it holds.
type Excess struct {
	ledger *Ledger
	before uint64 // how many had ended when this one began
	bytes  int64
}

// BeginExcess begins to measure, or returns nil if that says nothing: no volume may exceed what it owes, or what others occupy is
// counted, which includes it.
func (l *Ledger) BeginExcess() *Excess {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.index.exceeding == 0 || l.on.load().includesExcess() {
		return nil
	}
	return &Excess{ledger: l, before: l.excesses}
}

// Volumes are those to be measured.
func (e *Excess) Volumes() iter.Seq2[volume.ID, Info] { return e.ledger.Each(Info.mayExceed) }

// Add adds what is allocated to the file of a volume, in bytes.
func (e *Excess) Add(c Info, allocated int64) { e.bytes += max(0, allocated-e.ledger.Owed(c)) }

// End takes over what was measured. Unless that is all, the sum of before does not fall: not if a volume could not be measured, one may be in
// the trash, or another measuring has ended meanwhile, which may have been of later writes.
func (e *Excess) End(all bool) {
	l := e.ledger
	l.mu.Lock()
	defer l.unlock()
	if !all || l.sums.pieces > 0 || l.excesses != e.before {
		e.bytes = max(e.bytes, l.sums.excess)
	}
	l.sums.excess = e.bytes
	l.excesses++
}

// includesExcess reports whether the excess of volumes is in the base.
func (a *accounts) includesExcess() bool { return a.counted || a.atMost }

// excess is what the volumes of all pools take that is in no promise and not in the base, of what they owe together.
func (a *accounts) excess(owed *sums) int64 {
	if a.includesExcess() {
		return 0
	}
	return owed.excess
}
