package pool

import (
	"context"
	"errors"
	"slices"

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
	listings := make(map[*serve.Pool]*reconcile.Listing)
	for _, p := range s.Pools {
		l, done := list(p, after == volume.ID{})
		defer done()
		listings[p] = l
	}
	for {
		some := s.knownAfter(after, most+1)
		for _, v := range some {
			if len(page) == most {
				return page, page[most-1].ID
			}
			after = v.id
			answer := listings[v.pool].Report(v.id)
			if answer.Lost && listings[v.pool].Err == nil && !s.lost(v.id) {
				continue // it is being made or removed
			}
			page = append(page, answer)
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
}

// knownAfter are up to most volumes of all pools, in the order of their ids.
func (s *Set) knownAfter(after volume.ID, most int) []known {
	var all []known
	for _, p := range s.Pools {
		for _, v := range p.Ledger.Volumes(after, most) {
			all = append(all, known{v.ID, p})
		}
	}
	slices.SortStableFunc(all, func(a, b known) int { return a.id.Compare(b.id) })
	return all[:min(most, len(all))]
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
