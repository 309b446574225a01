package pool

import (
	"context"
	"errors"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Volume reports on one volume, lost ones included, and from memory of one whose pool does
// not serve. ErrNotFound means that there is none.
func (s *Set) Volume(_ context.Context, id volume.ID) (Volume, error) {
	v, err := s.findSettled(id)
	if err != nil {
		return s.remembered(id, err)
	}
	defer v.close()
	return v.visit.Scan().List(nil).Describe(v.id, v.entry, v.dir), nil
}

// Health is what is wrong with a volume, the worst first; nil for nothing. Of one whose pool does not
// serve or hangs that is what memory has. Errors: ErrNotFound; ErrUnavailable if no pool is known to have
// the volume, and one that may have it does not serve.
func (s *Set) Health(ctx context.Context, id volume.ID) ([]health.Condition, error) {
	holders := s.holders(id)
	if len(holders) == 1 {
		found, err := holders[0].Health(ctx, id)
		if !errors.Is(err, volume.ErrNotFound) {
			return found, err
		}
	}
	v, err := s.findSettled(id)
	if err != nil {
		return nil, err
	}
	defer v.close()
	return v.visit.Scan().Health(id)
}

// HealthHere is Health for a volume that this node is to publish: it cannot be used as long as a pool
// that may have it does not serve.
func (s *Set) HealthHere(ctx context.Context, id volume.ID) ([]health.Condition, error) {
	found, err := s.Health(ctx, id)
	if errors.Is(err, volume.ErrUnavailable) && !errors.Is(err, serve.ErrNotChecked) {
		return health.Facts{Volume: id.String(), Pool: err}.Conditions(), nil
	}
	return found, err
}

// remembered describes a volume that could not be read, as List does; or says why, if no
// pool is known to have it.
func (s *Set) remembered(id volume.ID, why error) (Volume, error) {
	holders := s.holders(id)
	if !errors.Is(why, volume.ErrUnavailable) || len(holders) != 1 {
		return Volume{}, why
	}
	l, done := list(holders[0], true)
	defer done()
	return l.Report(id), nil
}

// List reports up to most volumes in the order of their ids, beginning after an
// id; the zero id comes before all. If others follow, next is the id to go on after.
// A pool that does not serve has its volumes listed from memory.
func (s *Set) List(_ context.Context, after volume.ID, most int) (page []Volume, next volume.ID) {
	listings := make(listings)
	defer listings.close()
	for _, p := range s.Pools {
		listings.of(p, after == volume.ID{})
	}
	of := func(p *serve.Pool, after volume.ID, most int) (all []known) {
		for _, v := range p.Ledger.Volumes(after, most) {
			all = append(all, known{id: v.ID, pool: p})
		}
		return all
	}
	return s.page(listings, after, most, of, func(Volume) bool { return true })
}

// ListIll is List of the volumes that are abnormal, as far as the last survey knows of them. Where
// there are none it reads nothing.
func (s *Set) ListIll(_ context.Context, after volume.ID, most int) (page []Volume, next volume.ID) {
	listings := make(listings)
	defer listings.close()
	of := func(p *serve.Pool, after volume.ID, most int) (all []known) {
		for _, v := range p.Ill(after, most) {
			all = append(all, known{v.ID, p, v.Lost})
		}
		return all
	}
	return s.page(listings, after, most, of, func(v Volume) bool {
		return len(v.Conditions) > 0 && s.byName[v.Pool].Ledger.Known(v.ID).Exists()
	})
}

// listings are those that were begun, by their pools.
type listings map[*serve.Pool]listing

type listing struct {
	*reconcile.Listing
	done func()
}

func (l listings) of(p *serve.Pool, first bool) listing {
	begun, ok := l[p]
	if !ok {
		begun.Listing, begun.done = list(p, first)
		l[p] = begun
	}
	return begun
}

func (l listings) close() {
	for _, begun := range l {
		begun.done()
	}
}

// page reports on up to most volumes of those that of returns of each pool after an id, in the order
// of their ids.
func (s *Set) page(l listings, after volume.ID, most int, of func(*serve.Pool, volume.ID, int) []known, keep func(Volume) bool) (page []Volume, next volume.ID) {
	for {
		some := merge(s.Pools, func(p *serve.Pool) []known { return of(p, after, most+1) })
		for _, v := range some[:min(most+1, len(some))] {
			if len(page) == most {
				return page, page[most-1].ID
			}
			after = v.id
			in := l.of(v.pool, false)
			answer := in.Report(v.id)
			if answer.Lost && in.Err == nil && !v.lost && !s.lost(v.id) {
				continue // it is being made or removed
			}
			if keep(answer) {
				page = append(page, answer)
			}
		}
		if len(some) <= most {
			return page, volume.ID{}
		}
	}
}

// A known volume is one that the index of a pool has.
type known struct {
	id   volume.ID
	pool *serve.Pool
	lost bool // and not in the middle of a call
}

// merge brings volumes of all pools into the order of their ids.
func merge(pools []*serve.Pool, of func(*serve.Pool) []known) []known {
	var all []known
	for _, p := range pools {
		all = append(all, of(p)...)
	}
	slices.SortStableFunc(all, func(a, b known) int { return a.id.Compare(b.id) })
	return all
}

// lost reports whether a volume is lost, and not in the middle of a call.
func (s *Set) lost(id volume.ID) bool {
	v, err := s.findSettled(id)
	if err != nil {
		return false
	}
	defer v.close()
	return v.entry.Lost()
}

// list begins a listing. With the first page of a list it sees what other nodes of a shared
// pool have made.
func list(p *serve.Pool, first bool) (_ *reconcile.Listing, done func()) {
	v, err := p.Enter()
	if err != nil {
		return p.Scan().List(err), func() {}
	}
	s := v.Scan()
	if first { // it reads all records
		err = s.LoadShared()
	}
	return s.List(err), v.Close
}
