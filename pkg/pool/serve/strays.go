package serve

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// The owner of a file on XFS or ext4 can take it out of its project, and so out of the limit of
// its volume. That shows only at the file, so all files of such volumes are checked, slowly.

const (
	// searchEvery is how long a search of a pool rests before the next.
	searchEvery = time.Hour
	// searchBurst is how many files are checked between two rests. A rest is as many times as
	// long as the burst as leisure says, and at least searchRest: that bounds the rate, also
	// where all is in memory, to 2,560 files in a second.
	searchBurst = 256
	searchRest  = 100 * time.Millisecond
	// longestSearch bounds the time for one volume. The rest of it is not checked: as long as
	// a volume is searched, its filesystem cannot be unmounted.
	longestSearch = 10 * time.Minute
)

var (
	errStrays = errors.New("their owner changed their project")
	errLeases = errors.New("processes have leases of them, or they are encrypted without their key")
	errLong   = fmt.Errorf("it took more than %v; the rest is not searched", longestSearch)
)

// searches look for what left the limits of a pool's volumes.
type searches struct {
	pool  *Pool
	ended sync.Map // how the last search of a volume ended, by volume.ID
}

// searched is how the last search of a volume ended.
type searched struct {
	found quota.Strays
	err   error
}

// strayed is what left the limit of a volume, as the last search found.
func (s *searches) strayed(id volume.ID) (quota.Strays, error) {
	n, _ := s.ended.Load(id)
	last, _ := n.(searched)
	return last.found, last.err
}

// run searches the volumes of the pool for what left their limits, until ctx ends.
func (s *searches) run(ctx context.Context) {
	for reconcile.Rest(ctx, s.pool.Options.SyncEvery) == nil {
		s.search(ctx)
		if reconcile.Rest(ctx, searchEvery) != nil {
			return
		}
	}
}

// search goes over the volumes in the order of their ids, and holds nothing between two.
func (s *searches) search(ctx context.Context) {
	there := make(map[any]bool)
	for some := s.pool.Ledger.Volumes(volume.ID{}, 1); len(some) > 0 && ctx.Err() == nil; some = s.pool.Ledger.Volumes(some[0].ID, 1) {
		id := some[0].ID
		there[id] = true
		if err := s.volume(ctx, id); err != nil && ctx.Err() == nil {
			s.pool.Log.V(2).Info("Failed to search a volume for files outside its limit", "volume", id.String(), "err", err.Error())
		}
	}
	s.ended.Range(func(id, _ any) bool {
		if !there[id] {
			s.ended.Delete(id)
		}
		return true
	})
}

func (s *searches) volume(ctx context.Context, id volume.ID) error {
	v, err := s.pool.enter()
	if err != nil {
		return err
	}
	defer v.Close()
	e, d, err := v.View().Lookup(id)
	if err != nil || d == nil {
		return err
	}
	defer func() { _ = d.Close() }() // opened for reading
	limited, stop := context.WithTimeout(ctx, longestSearch)
	defer stop()
	found, err := v.Enforcer.Strays(d, reconcile.InfoOf(e), unhurried(limited))
	if ctx.Err() != nil {
		return err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = errLong
	}
	last, lastErr := s.strayed(id)
	if found.Outside > 0 && last.Outside == 0 {
		s.pool.Log.Error(errStrays, "A volume has files outside its limit", "volume", id.String(), "files", found.Outside)
	}
	if found.Unseen > 0 && last.Unseen == 0 || err != nil && lastErr == nil {
		s.pool.Log.Error(cmp.Or(err, errLeases), "Files of a volume could not be checked for being outside its limit", "volume", id.String(), "files", found.Unseen)
	}
	s.ended.Store(id, searched{found, err})
	return nil
}

// unhurried rests after each burst of steps, and ends with ctx.
func unhurried(ctx context.Context) func() error {
	steps, began := 0, time.Now()
	return func() error {
		if steps++; steps%searchBurst != 0 {
			return ctx.Err()
		}
		err := reconcile.Rest(ctx, min(max(leisure*time.Since(began), searchRest), longestLeisure))
		began = time.Now()
		return err
	}
}
