package pool

import (
	"context"
	"errors"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Volume reports on one volume, lost ones included, and from memory of one whose pool does
// not serve, or that several pools have. ErrNotFound means that there is none.
func (s *Set) Volume(ctx context.Context, id volume.ID) (Volume, error) {
	v, err := s.findSettled(ctx, id)
	if err != nil {
		return remembered(ctx, s, id, err)
	}
	defer v.close()
	return v.visit.View().List(nil).Describe(v.id, v.entry, v.dir), nil
}

// Health is what is wrong with a volume, the worst first; nil for nothing. Of one whose pool does not
// serve or hangs that is what memory has. Errors: ErrNotFound; ErrBusy while a call makes or removes it;
// ErrUnavailable if no pool is known to have the volume, and one that may have it does not serve.
func (s *Set) Health(ctx context.Context, id volume.ID) ([]health.Condition, error) {
	if holders := s.holders(id); len(holders) == 1 {
		found, err := holders[0].Health(ctx, id)
		if isAway(err) {
			return holders[0].View().Remembered(id, err), nil
		}
		if !errors.Is(err, volume.ErrNotFound) {
			return found, err
		}
	}
	found, err := healthIn(ctx, s.node.Pools, id)
	if errors.Is(err, volume.ErrAmbiguous) {
		return reconcile.Unread(id, err), nil
	}
	return found, err
}

// healthIn asks pools for a volume, one after the other. Each answers in its time.
func healthIn(ctx context.Context, pools []*serve.Pool, id volume.ID) (found []health.Condition, err error) {
	var in *serve.Pool
	var unavailable []error
	for _, p := range pools {
		conditions, err := p.Health(ctx, id)
		switch {
		case errors.Is(err, volume.ErrNotFound):
		case errors.Is(err, volume.ErrUnavailable):
			unavailable = append(unavailable, err)
		case err != nil:
			return nil, err
		case in != nil:
			return nil, serve.InTwo(id, in, p)
		default:
			in, found = p, conditions
		}
	}
	return found, notFoundUnless(in != nil, id, unavailable)
}

// isAway describes a pool that does not serve, and not one that will in a moment.
func isAway(err error) bool {
	return errors.Is(err, volume.ErrUnavailable) && !errors.Is(err, serve.ErrNotChecked)
}

// HealthHere is Health for a volume that this node is to publish: it cannot be used as long as a pool
// that may have it does not serve.
func (s *Set) HealthHere(ctx context.Context, id volume.ID) ([]health.Condition, error) {
	found, err := s.Health(ctx, id)
	if isAway(err) {
		return health.Facts{Volume: id.String(), Pool: err}.Conditions(), nil
	}
	return found, err
}

// remembered describes a volume that could not be read, as List does; or says why, if no
// pool is known to have it.
func remembered(ctx context.Context, s *Set, id volume.ID, why error) (Volume, error) {
	holders := s.holders(id)
	ambiguous := errors.Is(why, volume.ErrAmbiguous) && len(holders) > 0
	if !ambiguous && (!errors.Is(why, volume.ErrUnavailable) || len(holders) != 1) {
		return Volume{}, why
	}
	p := holders[0]
	if errors.Is(why, hang.ErrTimeout) { // entering it would take as long again
		return p.View().List(p.Unavailable(hang.ErrTimeout)).Report(id), nil
	}
	l, done := list(ctx, p, true)
	defer done()
	if ambiguous {
		return l.Remember(id, why), nil
	}
	return l.Report(id), nil
}

// List reports up to most volumes in the order of their ids, beginning after an
// id; the zero id comes before all. If others follow, next is the id to go on after.
// A pool that does not serve has its volumes listed from memory.
func (s *Set) List(ctx context.Context, after volume.ID, most int) (page []Volume, next volume.ID) {
	listings := make(listings)
	defer listings.close()
	for _, p := range s.node.Pools {
		listings.of(ctx, p, after == volume.ID{})
	}
	of := func(p *serve.Pool, after volume.ID, most int) (all []known) {
		for _, v := range p.Ledger.Volumes(after, most) {
			all = append(all, known{v.ID, p})
		}
		return all
	}
	page, next, _ = paged(s.node.Pools, after, most, of, func(v known) (answer Volume, is bool, _ error) { // it returns no error
		in := listings.of(ctx, v.pool, false)
		if why := s.node.Ambiguous(v.id); why != nil {
			return in.Remember(v.id, why), true, nil
		}
		answer = in.Report(v.id)
		return answer, settled(ctx, s, in, answer), nil
	})
	return page, next
}

// settled reports whether an answer is not about a moment of making or removing a volume: one is lost only outside of a call.
func settled(ctx context.Context, s *Set, in *reconcile.Listing, answer Volume) bool {
	if !answer.Lost || in.Err != nil {
		return true
	}
	v, err := s.findSettled(ctx, answer.ID)
	if err != nil {
		return false
	}
	defer v.close()
	return v.entry.Lost()
}

// An Ill is a volume with which something is wrong.
type Ill struct {
	ID         volume.ID
	Conditions []health.Condition
}

// ListIll is List of the volumes that are abnormal, as far as the last survey knows of them, with their
// Health. Where there are none it reads nothing. ErrUnavailable means that a pool is being opened.
func (s *Set) ListIll(ctx context.Context, after volume.ID, most int) (page []Ill, next volume.ID, err error) {
	of := func(p *serve.Pool, after volume.ID, most int) (all []known) {
		for _, v := range p.Ill(after, most) {
			all = append(all, known{v.ID, p})
		}
		return all
	}
	away := make(map[*serve.Pool]error) // why pools have not answered this call, which has not the time to ask again
	return paged(s.node.Pools, after, most, of, func(v known) (Ill, bool, error) {
		if why := away[v.pool]; why != nil {
			return Ill{v.id, v.pool.View().Remembered(v.id, why)}, true, nil
		}
		if why := s.node.Ambiguous(v.id); why != nil {
			return Ill{v.id, reconcile.Unread(v.id, why)}, true, nil
		}
		found, err := v.pool.Health(ctx, v.id)
		if isAway(err) {
			away[v.pool] = err
			return Ill{v.id, v.pool.View().Remembered(v.id, err)}, true, nil
		}
		if errors.Is(err, volume.ErrNotFound) || errors.Is(err, volume.ErrBusy) {
			return Ill{}, false, nil
		}
		return Ill{v.id, found}, len(found) > 0, err
	})
}

// listings are those that were begun, by their pools.
type listings map[*serve.Pool]begun

type begun struct {
	listing *reconcile.Listing
	done    func()
}

func (l listings) of(ctx context.Context, p *serve.Pool, first bool) *reconcile.Listing {
	in, ok := l[p]
	if !ok {
		in.listing, in.done = list(ctx, p, first)
		l[p] = in
	}
	return in.listing
}

func (l listings) close() {
	for _, in := range l {
		in.done()
	}
}

// paged reports on up to most volumes of those that of returns of each pool after an id, in the order
// of their ids, but not on those for which report returns false.
func paged[T any](pools []*serve.Pool, after volume.ID, most int, of func(*serve.Pool, volume.ID, int) []known, report func(known) (T, bool, error)) (page []T, next volume.ID, err error) {
	var last volume.ID
	for {
		some := merge(pools, func(p *serve.Pool) []known { return of(p, after, most+1) })
		for _, v := range some[:min(most+1, len(some))] {
			if len(page) == most {
				return page, last, nil
			}
			after = v.id
			answer, is, err := report(v)
			if err != nil {
				return nil, volume.ID{}, err
			}
			if is {
				page, last = append(page, answer), v.id
			}
		}
		if len(some) <= most {
			return page, volume.ID{}, nil
		}
	}
}

// A known volume is one that the index of a pool has.
type known struct {
	id   volume.ID
	pool *serve.Pool
}

// merge brings volumes of all pools into the order of their ids, each once.
func merge(pools []*serve.Pool, of func(*serve.Pool) []known) []known {
	var all []known
	for _, p := range pools {
		all = append(all, of(p)...)
	}
	slices.SortStableFunc(all, func(a, b known) int { return a.id.Compare(b.id) })
	return slices.CompactFunc(all, func(a, b known) bool { return a.id == b.id })
}

// list begins a listing. With the first page of a list it sees what other nodes of a shared
// pool have made.
func list(ctx context.Context, p *serve.Pool, first bool) (_ *reconcile.Listing, done func()) {
	v, err := p.Enter(ctx)
	if err != nil {
		return p.View().List(err), func() {}
	}
	s := v.View()
	if first { // it reads all records
		err = s.Index().LoadShared()
	}
	return s.List(err), v.Close
}
