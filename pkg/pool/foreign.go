package pool

import (
	"context"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// learnForeign notes what others hold on the pool's filesystem while nothing at all
// can be ours. Where nobody counts what volumes hold it is not known otherwise.
func (p *Pool) learnForeign(space dir.Space) {
	if p.config.Shared || p.enforcing() {
		return // what others promised meanwhile is not known, or count knows better
	}
	p.mu.Lock()
	defer p.unlock()
	if p.ledger.promised == 0 && len(p.trash.pieces) == 0 {
		p.ledger.foreign = space.TakenBytes()
	}
	p.ledger.foreign = min(p.ledger.foreign, space.TakenBytes())
}

// countAll counts what others hold, where quotas count what volumes hold, until ctx
// ends. It is apart from the looks at a pool: on a slow disk it may take a while.
func (p *Pool) countAll(ctx context.Context) {
	tick := time.NewTicker(p.options.SyncEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s, err := p.enter()
		if err != nil {
			continue
		}
		s.count()
		s.close()
	}
}

// count takes what volumes and trash hold from what is taken. If that cannot be
// known now, the last number stays.
func (s *session) count() {
	if s.quota == nil || s.pool.config.Shared || s.anyUnlimited() {
		s.pool.used.Store(unknownBytes)
		return
	}
	before, err := s.space()
	if err != nil {
		return
	}
	used, trashed, err := s.used()
	if err != nil {
		s.pool.noteError()
		s.pool.log.Error(err, "what others hold on the pool's filesystem could not be counted")
		return
	}
	s.pool.used.Store(used)
	after, err := s.space()
	if err != nil {
		return
	}
	// What was written or erased meanwhile counts as foreign until next time, and not
	// as free.
	taken := max(before.TakenBytes(), after.TakenBytes())
	s.pool.mu.Lock()
	defer s.pool.unlock()
	s.pool.ledger.foreign = max(0, taken-used-trashed)
}

// anyUnlimited tells whether there is a promise of which nobody counts the use.
func (s *session) anyUnlimited() bool {
	return s.pool.any(func(c card) bool { return c.is(hasRecord) && !s.enforced(c) })
}

// used is what the volumes of the pool hold, and what its trash does, in bytes.
func (s *session) used() (volumes, trash int64, err error) {
	for id, c := range s.limited() {
		s.pool.steps.Add(1) // when the pool is opened this is part of the look
		used, err := s.usedBy(id, c)
		if err != nil {
			return 0, 0, err
		}
		volumes += used
	}
	if err := s.work(); err != nil {
		return 0, 0, err
	}
	return volumes, s.usedByTrash(), nil
}

// usedByTrash is what the trash holds, and notes it of each piece. One that cannot be
// counted holds what it did at last.
func (s *session) usedByTrash() (sum int64) {
	for _, name := range s.pool.queued(true) {
		used, err := s.usedByPiece(name)
		switch {
		case err != nil:
			used = s.pool.uncounted(name, err)
		case used != unknownBytes:
			s.pool.trashHolds(name, used)
		}
		sum += max(0, used)
	}
	return sum
}

// usedByPiece is what a piece of trash holds. Of one that came without a limit nobody
// knows.
func (s *session) usedByPiece(name string) (int64, error) {
	id, err := s.idIn(s.trash, name)
	if err != nil || id == 0 {
		return unknownBytes, err
	}
	return s.usedIn(s.trash, name, id)
}

// measureTrash has monitoring know what is about to be erased. Without quotas nobody does.
func (s *session) measureTrash() {
	if s.quota != nil {
		s.usedByTrash()
	}
}

// uncounted tells of a piece of trash that cannot be counted, once in a while, and
// answers what it held at last.
func (p *Pool) uncounted(name string, err error) int64 {
	p.mu.Lock()
	last, tell := p.trash.uncounted(name, time.Now())
	p.mu.Unlock()
	if tell {
		p.noteError()
		p.log.Error(err, "what a piece of trash holds could not be counted", "trash", name)
	}
	return last
}

func (p *Pool) trashHolds(name string, bytes int64) {
	p.mu.Lock()
	defer p.unlock()
	p.trash.measured(name, bytes)
}

// usedBy is what a volume holds: by its id, or, where the kernel chose that, by its
// directory.
func (s *session) usedBy(id VolumeID, c card) (int64, error) {
	if c.quotaID() == 0 {
		return s.usedIn(s.root, id.name, 0)
	}
	usage, err := s.quota.Usage(s.root, c.quotaID())
	return usage.Bytes, err
}

// usedIn is what one directory holds. One that went away meanwhile holds nothing.
func (s *session) usedIn(parent *dir.Dir, name string, id quota.ID) (int64, error) {
	d, err := parent.Open(name)
	if isMissing(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer func() { _ = d.Close() }()
	if id == 0 {
		if id, err = s.quota.IDOf(d); err != nil || id == 0 {
			return 0, err
		}
	}
	usage, err := s.quota.Usage(d, id)
	return usage.Bytes, err
}
