package pool

import (
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// learnForeign finds out what others hold on the pool's filesystem. Where quotas
// count what volumes hold it is the rest. Where nobody does it is known only while
// nothing at all can be ours.
func (s *session) learnForeign(space dir.Space) error {
	p := s.pool
	if p.config.Shared {
		return nil // what others promised meanwhile is not known here
	}
	if s.quota == nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.ledger.promised == 0 && len(p.trash) == 0 {
			p.ledger.foreign = space.TakenBytes()
		}
		p.ledger.foreign = min(p.ledger.foreign, space.TakenBytes())
		return nil
	}
	if s.anyUnlimited() {
		return nil
	}
	used, err := s.used()
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ledger.foreign = max(0, space.TakenBytes()-used)
	return nil
}

// anyUnlimited tells whether there is a promise of which nobody counts the use.
func (s *session) anyUnlimited() bool {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	for _, e := range s.pool.index.byID {
		if e.record != nil && !enforced(s.quota, e) {
			return true
		}
	}
	return false
}

// used is what the volumes and the trash of the pool hold, in bytes.
func (s *session) used() (sum int64, err error) {
	for id, e := range s.pool.limited(s.quota) {
		used, err := s.usedIn(s.root, id.name, quota.ID(e.record.ProjectID))
		if err != nil {
			return 0, err
		}
		sum += used
	}
	if err := s.work(); err != nil {
		return 0, err
	}
	for _, name := range s.pool.queued(true) {
		used, err := s.usedIn(s.trash, name, 0)
		if err != nil {
			return 0, err
		}
		sum += used
	}
	return sum, nil
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
