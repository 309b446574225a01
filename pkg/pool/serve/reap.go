package serve

import (
	"context"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
)

// Thrown queues an entry of the trash for the reaper.
func (p *Pool) Thrown(name string) {
	if p.Ledger.Trash().Throw(name, store.ParseThrown(name).Promised) {
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
	queued := p.Ledger.Trash().Names(stuckToo)
	if len(queued) == 0 {
		return
	}
	s, err := p.Enter()
	if err != nil {
		return // the watcher wakes the reaper when the pool is back
	}
	defer s.Close()
	if err := s.Work(); err != nil {
		return
	}
	s.Discard().Erase(ctx, queued, &p.erasedFiles)
}
