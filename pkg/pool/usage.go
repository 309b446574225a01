package pool

import (
	"context"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// learnForeign notes what others hold on the pool's filesystem while nothing at all
// can be ours. Where nobody counts what volumes hold it is not known otherwise.
func (p *Pool) learnForeign(space dir.Space) {
	if p.config.Shared || p.enforcing() {
		return // what others promised meanwhile is not known, or count knows better
	}
	p.ledger.LearnForeign(space.TakenBytes())
}

// countAll counts what others hold, where quotas count what volumes hold, until ctx
// ends. It is apart from the checks at a pool: on a slow disk it may take a while. Of the pools
// on one filesystem one counts for all.
func (p *Pool) countAll(ctx context.Context) {
	tick := time.NewTicker(p.options.SyncEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if !p.countsForAll() {
			continue
		}
		s, err := p.enter()
		if err != nil {
			continue
		}
		s.count()
		s.close()
	}
}

// countsForAll reports whether the pool is the first on its filesystem that serves.
func (p *Pool) countsForAll() bool {
	for _, other := range p.filesystems.with(p) {
		if other == p {
			return true
		}
		if other.state.Load().err == nil {
			return false
		}
	}
	return true // it was not opened yet
}

// count takes what volumes and trash of all pools on the filesystem hold from what is taken.
// If that cannot be known now, the last number stays.
func (v *visit) count() {
	before, err := v.store.Space()
	if err != nil {
		return
	}
	var held int64
	known := true
	for _, p := range v.pool.filesystems.with(v.pool) {
		bytes, ok := p.held(v)
		held, known = held+bytes, known && ok
	}
	if !known {
		return
	}
	after, err := v.store.Space()
	if err != nil {
		return
	}
	// What was written or erased meanwhile counts as foreign until next time, and not
	// as free.
	taken := max(before.TakenBytes(), after.TakenBytes())
	v.pool.ledger.SetForeign(taken - held)
}

// held is what the volumes and the trash of a pool hold, if that can be known now. The visit
// is one of this pool, or of another on its filesystem.
func (p *Pool) held(by *visit) (bytes int64, known bool) {
	v := by
	if v.pool != p {
		var err error
		if v, err = p.enter(); err != nil {
			return 0, false
		}
		defer v.close()
	}
	if v.keeper.Kind() == "" || p.config.Shared || v.anyUnlimited() {
		p.used.Store(volume.Unknown)
		return 0, false
	}
	used, trashed, err := v.used()
	if err != nil {
		p.noteError()
		p.log.Error(err, "failed to count what others hold on the pool's filesystem")
		return 0, false
	}
	p.used.Store(used)
	return used + trashed, true
}

// anyUnlimited reports whether there is a promise of which nobody counts the use.
func (v *visit) anyUnlimited() bool {
	return v.pool.ledger.Any(func(c ledger.Card) bool { return c.Is(ledger.HasRecord) && !v.keeper.Enforces(c) })
}

// used is what the volumes of the pool hold, and what its trash does, in bytes.
func (v *visit) used() (volumes, trash int64, err error) {
	for id, c := range v.limited() {
		v.pool.steps.Add(1) // when the pool is opened this is part of the check
		used, err := v.keeper.UsedBy(v.store.Root(), id.String(), c)
		if err != nil {
			return 0, 0, err
		}
		volumes += used
	}
	if err := v.work(); err != nil {
		return 0, 0, err
	}
	return volumes, v.usedByTrash(), nil
}

// usedByTrash is what the trash holds, and notes it of each piece. One that cannot be
// counted holds what it did at last.
func (v *visit) usedByTrash() (sum int64) {
	for _, name := range v.pool.ledger.Trash(true) {
		used, err := v.usedByPiece(name)
		switch {
		case err != nil:
			used = v.pool.uncounted(name, err)
		case used != volume.Unknown:
			v.pool.ledger.TrashMeasured(name, used)
		}
		sum += max(0, used)
	}
	return sum
}

// usedByPiece is what a piece of trash holds. Of one that came without a limit nobody
// knows.
func (v *visit) usedByPiece(name string) (int64, error) {
	id, err := v.keeper.IDIn(v.store.Trash(), name)
	if err != nil || id == 0 {
		return volume.Unknown, err
	}
	return v.keeper.UsedIn(v.store.Trash(), name, id)
}

// measureTrash has monitoring know what is about to be erased. Without quotas nobody does.
func (v *visit) measureTrash() {
	if v.keeper.Kind() != "" {
		v.usedByTrash()
	}
}

// uncounted logs, once in a while, a piece of trash that cannot be counted, and
// answers what it held at last.
func (p *Pool) uncounted(name string, err error) int64 {
	last, tell := p.ledger.TrashUnmeasured(name)
	if tell {
		p.noteError()
		p.log.Error(err, "failed to count what a trash entry holds", "trash", name)
	}
	return last
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
	space, err := s.store.Space()
	if err != nil {
		return 0
	}
	return p.ledger.Available(space)
}

// note brings the ledger in line with what is on disk of a volume.
func (p *Pool) note(id volume.ID, e store.Entry) { p.ledger.Note(id, cardOf(e)) }
