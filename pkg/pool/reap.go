package pool

import (
	"context"
	"sync/atomic"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// thrown queues an entry of the trash for the reaper.
func (p *Pool) thrown(name string) {
	if p.ledger.Throw(name, store.ParseThrown(name).Promised) {
		p.wakeReaper()
	}
}

func (p *Pool) wakeReaper() {
	select {
	case p.wake <- struct{}{}:
	default: // it is awake already
	}
}

// reap removes trash until ctx ends.
func (p *Pool) reap(ctx context.Context) {
	retry := time.NewTicker(ledger.RetryStuck)
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
	queued := p.ledger.Trash(stuckToo)
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
	s.scan().MeasureTrash()
	pace := &pace{done: &p.erasedFiles} // of all pieces: small ones have less than a burst
	for _, name := range queued {
		start := time.Now()
		err := s.erase(ctx, name, pace.step)
		if ctx.Err() != nil {
			return
		}
		p.ledger.TrashTried(name, err)
		if err != nil {
			p.noteError()
			p.log.Error(err, "failed to erase trash; it is kept and tried again", "trash", name)
			s.measureStuck(ctx, name)
			continue
		}
		p.log.V(4).Info("removed trash", "trash", name, "duration", time.Since(start))
	}
}

// measureStuck finds out what a piece of trash occupies that stays and had too many files to
// count them at the start. Until then all that is taken on the filesystem counts as foreign.
func (v *visit) measureStuck(ctx context.Context, name string) {
	if v.pool.ledger.TrashPromise(name) != volume.Unknown {
		return
	}
	pace := &pace{done: new(atomic.Uint64)}
	bytes, err := v.store.Trash().Occupied(name, func() error { return pace.step(ctx) })
	if err != nil {
		v.pool.log.Error(err, "failed to measure trash that is kept", "trash", name)
		return
	}
	v.pool.ledger.TrashHolds(name, bytes)
}

// erase removes a piece of trash, and then gives its id back: not before, for what
// is left of the tree would count against the next volume.
func (v *visit) erase(ctx context.Context, name string, pause func(context.Context) error) error {
	id, err := v.keeper.Lift(v.store.Trash(), name, store.ParseThrown(name).UID)
	if err != nil {
		return err
	}
	id = v.pool.ledger.TrashID(name, id)
	if err := v.store.Trash().RemoveTree(ctx, name, pause); err != nil {
		return err
	}
	return v.keeper.Release(v.store.Root(), id)
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
