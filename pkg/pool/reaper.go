package pool

import (
	"context"
	"sync/atomic"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// trashed queues an entry of the trash for removal.
func (p *Pool) trashed(name string, promised int64) {
	p.mu.Lock()
	defer p.unlock()
	p.queue(name, promised)
}

// foundTrash queues an entry that was seen in the trash when so many pieces were erased.
// If any was since, it may be that one, and if it is not, it will be found again.
func (p *Pool) foundTrash(name string, holds int64, erased uint64) {
	p.mu.Lock()
	defer p.unlock()
	if p.erased.pieces.Load() == erased {
		p.queue(name, holds)
	}
}

// queue is trashed for callers that hold the mutex.
func (p *Pool) queue(name string, promised int64) {
	if p.trash.add(name, promised, time.Now()) {
		p.ledger.addTrash(promised)
		p.wakeReaper()
	}
}

// knowsTrash tells whether an entry of the trash is queued, or could not be removed.
func (p *Pool) knowsTrash(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, known := p.trash.pieces[name]
	return known
}

func (p *Pool) wakeReaper() {
	select {
	case p.wake <- struct{}{}:
	default: // it will look anyway
	}
}

// retryStuck is when trash that could not be removed is tried again.
const retryStuck = time.Hour

// reap removes trash until ctx ends.
func (p *Pool) reap(ctx context.Context) {
	retry := time.NewTicker(retryStuck)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-retry.C:
			p.reapAll(ctx, true)
		case <-p.wake:
			p.reapAll(ctx, false)
		}
	}
}

// reapAll removes what is queued, as long as the pool serves.
func (p *Pool) reapAll(ctx context.Context, stuckToo bool) {
	queued := p.queued(stuckToo)
	if len(queued) == 0 {
		return
	}
	s, err := p.enter()
	if err != nil {
		return // the watcher wakes the reaper when the pool is back
	}
	defer s.close()
	if err := s.work(); err != nil {
		return
	}
	s.measureTrash()
	pace := &pace{done: &p.erased.files} // of all pieces: small ones have less than a burst
	for _, name := range queued {
		start := time.Now()
		err := s.erase(ctx, name, pace.step)
		if ctx.Err() != nil {
			return
		}
		p.reaped(name, err)
		if err != nil {
			p.noteError()
			p.log.Error(err, "trash could not be removed and is kept", "trash", name)
			continue
		}
		p.log.V(4).Info("removed trash", "trash", name, "duration", time.Since(start))
	}
}

// erase removes a piece of trash, and then gives its id back: not before, for what
// is left of the tree would count against the next volume.
func (s *session) erase(ctx context.Context, name string, pause func(context.Context) error) error {
	id, err := s.unlimit(name)
	if err != nil {
		return err
	}
	id = s.pool.remember(name, id)
	if err := s.trash.RemoveTree(ctx, name, pause); err != nil {
		return err
	}
	return s.releaseID(id)
}

// remember keeps the id of a piece of trash, and answers the one that is kept.
func (p *Pool) remember(name string, id quota.ID) quota.ID {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.trash.pieces[name]
	if r == nil {
		return id // erased before
	}
	if id != 0 {
		r.id = id
	}
	return r.id
}

func (p *Pool) queued(stuckToo bool) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.trash.queued(stuckToo)
}

func (p *Pool) reaped(name string, err error) {
	p.mu.Lock()
	defer p.unlock()
	if r := p.trash.pieces[name]; r != nil && err == nil {
		p.ledger.dropTrash(r.promised)
		p.erased.pieces.Add(1)
	}
	p.trash.tried(name, err)
}

// pace bounds the reaper's share of the disk: after each burst of work it rests for
// several times as long as the burst took.
type pace struct {
	began time.Time
	steps int
	done  *atomic.Uint64 // counts all steps
}

const (
	// burst is how many removals come between two rests. What they leave to the journal
	// is what the next call that syncs has to wait for.
	burst = 16
	// idle is how many times as long as a burst the rest after it is. Filesystems do a
	// part of the work of a removal later, in threads of their own, which the time of the
	// burst does not show.
	idle = 3
	// longestPause bounds that rest: a disk that hung in the midst of a burst needs none
	// that is as long.
	longestPause = time.Second
)

func (p *pace) step(ctx context.Context) error {
	p.done.Add(1)
	if p.began.IsZero() {
		p.began = time.Now()
	}
	if p.steps++; p.steps < burst {
		return ctx.Err()
	}
	err := rest(ctx, min(idle*time.Since(p.began), longestPause))
	p.steps, p.began = 0, time.Now()
	return err
}

func rest(ctx context.Context, how time.Duration) error {
	if how <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(how)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
