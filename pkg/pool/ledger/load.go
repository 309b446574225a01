package ledger

import (
	"maps"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Load is a reading of the disk. What calls of this node note of a volume meanwhile counts
// more than what it reads. Of two loads that overlap, the one that began later counts. What
// other nodes do while both read may then be seen by the next load only. So who sells space of
// a shared pool loads it under the lock without which no other node promises anything.
type Load struct {
	ledger *Ledger
	index  index
	others int64 // what the trash of other nodes may occupy
	noted  ids   // what calls have noted meanwhile
	passed bool  // one that began later is over
}

// BeginLoad begins a load, which is informed of what calls note until its End.
func (l *Ledger) BeginLoad() *Load {
	l.mu.Lock()
	defer l.mu.Unlock()
	load := &Load{ledger: l, index: index{option: l.policy.BytesPerInode, costs: l.sums.costs}, others: l.sums.others, noted: maps.Clone(l.kept)}
	if load.noted == nil {
		load.noted = make(ids)
	}
	l.loads = append(l.loads, load)
	return load
}

// Put adds what was read of a volume.
func (l *Load) Put(id volume.ID, c Info) { l.index.put(id, c) }

// Get is what was read of a volume so far.
func (l *Load) Get(id volume.ID) Info { return l.index.get(id) }

// SetOthers notes what the trash of other nodes may still occupy, in bytes, or volume.Unknown.
func (l *Load) SetOthers(held int64) { l.others = held }

// End takes over what was read, unless reading failed with the error that is given.
func (l *Load) End(err error) {
	in := l.ledger
	in.mu.Lock()
	defer in.unlock()
	at := slices.Index(in.loads, l)
	earlier := in.loads[:at]
	in.loads = slices.Delete(in.loads, at, at+1)
	if err != nil || l.passed {
		return
	}
	for _, other := range earlier {
		other.passed = true
	}
	for id := range l.noted {
		l.index.put(id, in.index.get(id))
	}
	in.sums.promised += l.index.promised - in.index.promised
	in.sums.others, in.sums.unread = l.others, false
	in.index = l.index
}

// Keep has loads that begin before the returned function is called leave a volume as it is
// known: a record that they find gone is not counted as trash before that.
func (l *Ledger) Keep(id volume.ID) (until func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.kept == nil {
		l.kept = make(ids)
	}
	l.kept[id] = struct{}{}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.kept, id)
	}
}
