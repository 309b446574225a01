package pool

import (
	"context"
	"errors"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Volume tells of one volume, lost ones included, and from memory of one whose pool does
// not serve. ErrNotFound means that there is none.
func (s *Set) Volume(_ context.Context, id VolumeID) (Volume, error) {
	v, err := s.look(id)
	if err != nil {
		return s.remembered(id, err)
	}
	defer v.close()
	l := &listing{pool: v.session.pool, session: v.session}
	l.err = l.ask()
	return l.tell(v.id, v.entry, v.dir), nil
}

// remembered tells of a volume that could not be looked at, as List does; or why, if no
// pool is known to have it.
func (s *Set) remembered(id VolumeID, why error) (Volume, error) {
	holders := s.holders(id)
	if !errors.Is(why, ErrUnavailable) || len(holders) != 1 {
		return Volume{}, why
	}
	l := holders[0].list(true)
	defer l.close()
	return l.volume(id), nil
}

// nodes are those that have a volume published, this one first.
func (p *Pool) nodes(here []bind.Publication, elsewhere []NodeID) []NodeID {
	if len(here) == 0 {
		return elsewhere
	}
	return append([]NodeID{p.options.Node}, elsewhere...)
}

// List tells of up to most volumes in the order of their ids, beginning after an
// id; the zero id comes before all. If others follow, next is the id to go on after.
// A pool that does not serve has its volumes listed from memory.
func (s *Set) List(_ context.Context, after VolumeID, most int) (page []Volume, next VolumeID) {
	type at struct {
		id   VolumeID
		pool *Pool
	}
	var all []at
	listings := make(map[*Pool]*listing)
	for _, p := range s.pools {
		l := p.list(after == VolumeID{})
		defer l.close()
		listings[p] = l
		for _, id := range p.after(after, most+1, card.exists) {
			all = append(all, at{id, p})
		}
	}
	slices.SortStableFunc(all, func(a, b at) int { return compareIDs(a.id, b.id) })
	if len(all) > most {
		all = all[:most]
		next = all[most-1].id
	}
	for _, v := range all {
		volume := listings[v.pool].volume(v.id)
		if volume.Lost && listings[v.pool].err == nil && !s.lost(v.id) {
			continue // it is being made or removed
		}
		page = append(page, volume)
	}
	return page, next
}

// lost tells whether a volume is lost, and not in the middle of a call.
func (s *Set) lost(id VolumeID) bool {
	v, err := s.look(id)
	if err != nil {
		return false
	}
	defer v.close()
	return v.entry.lost()
}

// A listing is what one page of a list needs of a pool, asked once.
type listing struct {
	pool      *Pool
	session   *session // nil if the pool does not serve
	err       error    // why
	space     dir.Space
	published map[string][]bind.Publication
	attached  *attachments // nil as long as no block volume was met
	elsewhere map[string][]NodeID
}

// list begins a listing. With the first page of a list it sees what other nodes of a shared
// pool have made.
func (p *Pool) list(first bool) *listing {
	l := &listing{pool: p}
	l.err = l.open(first)
	return l
}

func (l *listing) open(first bool) (err error) {
	if l.session, err = l.pool.enter(); err != nil {
		return err
	}
	if first { // it reads all records
		if err := l.session.loadShared(); err != nil {
			return err
		}
	}
	return l.ask()
}

// ask reads what is the same for all volumes of the pool.
func (l *listing) ask() (err error) {
	if l.space, err = l.session.space(); err != nil {
		return err
	}
	if l.published, err = l.pool.options.Mounts.Published(l.session.root); err != nil {
		return err
	}
	l.elsewhere, err = l.session.publishedElsewhere()
	return err
}

func (l *listing) close() {
	if l.session != nil {
		l.session.close()
	}
}

// volume reads what the disk has of a volume, if the pool serves.
func (l *listing) volume(id VolumeID) Volume {
	if l.err != nil {
		return l.remember(id, nil)
	}
	e, d, err := l.session.lookup(id)
	if err != nil {
		return l.remember(id, err)
	}
	if d != nil {
		defer func() { _ = d.Close() }() // opened for reading
	}
	return l.tell(id, e, d)
}

// remember is what is told of a volume from memory: its pool does not serve, or it could
// not be read for the reason that is given.
func (l *listing) remember(id VolumeID, unread error) Volume {
	c := l.pool.known(id)
	return l.answer(id, c, c.facts(l.err, unread), l.published[id.name])
}

// tell is all that is told of a volume: how it is, and where.
func (l *listing) tell(id VolumeID, e entry, d *dir.Dir) Volume {
	if l.err != nil {
		return l.answer(id, e.card(), health.Facts{Pool: l.err}, l.published[id.name])
	}
	_, facts := l.session.measure(id, d, e, l.space)
	devices := l.devices(&found{id: id, entry: e, dir: d})
	return l.answer(id, e.card(), facts, append(slices.Clone(l.published[id.name]), devices...))
}

func (l *listing) answer(id VolumeID, c card, facts health.Facts, published []bind.Publication) Volume {
	v := l.pool.volume(id, c, l.space)
	v.Enforced = v.Enforced && !facts.LimitDiffers
	v.Condition = facts.Condition()
	v.Nodes = l.pool.nodes(published, l.elsewhere[id.name])
	return v
}

// devices is where the devices of a volume are published, as far as they tell. One that does
// not answer may be anybody's, and says nothing of how the volume is.
func (l *listing) devices(v *found) []bind.Publication {
	file, ok, err := v.file()
	if err != nil || !ok {
		return nil // measure tells why
	}
	if l.attached == nil {
		attached, _ := l.pool.options.attachments() // the sweep logs the error
		l.attached = &attached
	}
	return l.attached.publications(file)
}
