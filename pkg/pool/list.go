package pool

import (
	"context"
	"errors"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
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
	l := &listing{pool: v.visit.pool, visit: v.visit}
	l.err = l.read()
	return l.describe(v.id, v.entry, v.dir), nil
}

// remembered describes a volume that could not be read, as List does; or says why, if no
// pool is known to have it.
func (s *Set) remembered(id volume.ID, why error) (Volume, error) {
	holders := s.holders(id)
	if !errors.Is(why, volume.ErrUnavailable) || len(holders) != 1 {
		return Volume{}, why
	}
	l := holders[0].list(true)
	defer l.close()
	return l.volume(id), nil
}

// nodes are those that have a volume published, this one first.
func (p *Pool) nodes(here []bind.Publication, elsewhere []volume.NodeID) []volume.NodeID {
	if len(here) == 0 {
		return elsewhere
	}
	return append([]volume.NodeID{p.options.Node}, elsewhere...)
}

// List reports up to most volumes in the order of their ids, beginning after an
// id; the zero id comes before all. If others follow, next is the id to go on after.
// A pool that does not serve has its volumes listed from memory.
func (s *Set) List(_ context.Context, after volume.ID, most int) (page []Volume, next volume.ID) {
	type at struct {
		id   volume.ID
		pool *Pool
	}
	var all []at
	listings := make(map[*Pool]*listing)
	for _, p := range s.pools {
		l := p.list(after == volume.ID{})
		defer l.close()
		listings[p] = l
		for _, v := range p.ledger.After(after, most+1) {
			all = append(all, at{v.ID, p})
		}
	}
	slices.SortStableFunc(all, func(a, b at) int { return a.id.Compare(b.id) })
	if len(all) > most {
		all = all[:most]
		next = all[most-1].id
	}
	for _, v := range all {
		answer := listings[v.pool].volume(v.id)
		if answer.Lost && listings[v.pool].err == nil && !s.lost(v.id) {
			continue // it is being made or removed
		}
		page = append(page, answer)
	}
	return page, next
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

// A listing is what one page of a list needs of a pool, asked once.
type listing struct {
	pool      *Pool
	visit     *visit // nil if the pool does not serve
	err       error  // why
	space     dir.Space
	published map[string][]bind.Publication
	attached  *content.Attachments // nil as long as no block volume was met
	elsewhere map[string][]volume.NodeID
}

// list begins a listing. With the first page of a list it sees what other nodes of a shared
// pool have made.
func (p *Pool) list(first bool) *listing {
	l := &listing{pool: p}
	l.err = l.open(first)
	return l
}

func (l *listing) open(first bool) (err error) {
	if l.visit, err = l.pool.enter(); err != nil {
		return err
	}
	if first { // it reads all records
		if err := l.visit.loadShared(); err != nil {
			return err
		}
	}
	return l.read()
}

// read reads what is the same for all volumes of the pool.
func (l *listing) read() (err error) {
	if l.space, err = l.visit.store.Space(); err != nil {
		return err
	}
	return l.readPublished()
}

func (l *listing) close() {
	if l.visit != nil {
		l.visit.close()
	}
}

// volume reads what the disk has of a volume, if the pool serves.
func (l *listing) volume(id volume.ID) Volume {
	if l.err != nil {
		return l.remember(id, nil)
	}
	e, d, err := l.visit.lookup(id)
	if err != nil {
		return l.remember(id, err)
	}
	if d != nil {
		defer func() { _ = d.Close() }() // opened for reading
	}
	return l.describe(id, e, d)
}

// remember is what is reported of a volume from memory: its pool does not serve, or it could
// not be read for the reason that is given.
func (l *listing) remember(id volume.ID, unread error) Volume {
	c := l.pool.ledger.Known(id)
	return l.answer(id, c, rememberedFacts(c, l.err, unread), l.published[id.String()])
}

// describe is all that is reported of a volume: how it is, and where.
func (l *listing) describe(id volume.ID, e store.Entry, d *dir.Dir) Volume {
	if l.err != nil {
		return l.answer(id, cardOf(e), health.Facts{Pool: l.err}, l.published[id.String()])
	}
	_, facts := l.visit.measure(id, d, e, l.space)
	facts.InlineUnpublished = l.leftBehind(id, e)
	devices := l.devices(&found{id: id, entry: e, dir: d})
	return l.answer(id, cardOf(e), facts, append(slices.Clone(l.published[id.String()]), devices...))
}

func (l *listing) answer(id volume.ID, c ledger.Card, facts health.Facts, published []bind.Publication) Volume {
	v := l.pool.volume(id, c, l.space)
	v.Enforced = v.Enforced && !facts.LimitDiffers
	v.Condition = facts.Condition()
	v.Nodes = l.pool.nodes(published, l.elsewhere[id.String()])
	return v
}

// devices is where the devices of a volume are published, as far as they answer. One that does
// not answer may be anybody's, and says nothing of how the volume is.
func (l *listing) devices(v *found) []bind.Publication {
	file, ok, err := v.file()
	if err != nil || !ok {
		return nil // measure says why
	}
	if l.attached == nil {
		attached, _ := l.pool.host().Attachments() // the sweep logs the error
		l.attached = &attached
	}
	return l.attached.Publications(file)
}
