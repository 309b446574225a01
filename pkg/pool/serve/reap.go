package serve

import (
	"context"
	"sync/atomic"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
)

// QueueTrash queues an entry of the trash for the reaper.
func (p *Pool) QueueTrash(name string) {
	p.Ledger.Trash().Throw(name, store.ParseTrashName(name).Promised)
}

// A reaper erases the trash of a pool.
type reaper struct {
	pool  *Pool
	files atomic.Uint64 // how many files and directories it has taken on
}

// run removes trash until ctx ends.
func (r *reaper) run(ctx context.Context) {
	retry := time.NewTicker(ledger.RetryStuck)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-retry.C:
			r.reap(ctx, true)
		case <-r.pool.Ledger.Trash().Queued():
			r.reap(ctx, false)
		}
	}
}

// reap removes what is queued, as long as the pool serves.
func (r *reaper) reap(ctx context.Context, stuckToo bool) {
	queued := r.pool.Ledger.Trash().Names(stuckToo)
	if len(queued) == 0 {
		return
	}
	s, err := r.pool.enter()
	if err != nil {
		return // the watcher wakes the reaper when the pool is back
	}
	defer s.Close()
	if err := s.Work(); err != nil {
		return
	}
	s.Discard().Erase(ctx, queued, &r.files)
}
