package reconcile

import (
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Listing is what reports on several volumes of a pool share, read once.
type Listing struct {
	In *View
	// Err is why the pool does not serve, or what reading the rest gave.
	Err   error
	Space dir.Space
	// Published is what this node has published of the pool, by name, without devices.
	Published map[string][]bind.Publication
	// Elsewhere is what other nodes have published.
	Elsewhere map[string][]volume.NodeID
	attached  *content.Attachments // nil as long as no block volume was met
}

// List begins a listing. Of a pool that does not serve, for the reason that is given, it has
// what memory has.
func (p *View) List(err error) *Listing {
	l := &Listing{In: p, Err: err}
	if err == nil {
		l.Err = l.Read()
	}
	return l
}

// Read reads what is the same for all volumes of the pool.
func (l *Listing) Read() (err error) {
	if l.Space, err = l.In.Store.Space(); err != nil {
		return err
	}
	return l.readPublished()
}

// Report reads what the disk has of a volume, if the pool serves.
func (l *Listing) Report(id volume.ID) Volume {
	if l.Err != nil {
		return l.Remember(id, nil)
	}
	e, d, err := l.In.Lookup(id)
	if err != nil {
		return l.Remember(id, err)
	}
	if d != nil {
		defer func() { _ = d.Close() }() // opened for reading
	}
	return l.Describe(id, e, d)
}

// Unread is what is wrong with a volume that calls cannot read, for the reason that is given.
func Unread(id volume.ID, why error) []health.Condition {
	return health.Facts{Volume: id.String(), IO: why}.Conditions()
}

// Remember is what is reported of a volume from memory: its pool does not serve, or it cannot
// be read for the reason that is given.
func (l *Listing) Remember(id volume.ID, unread error) Volume {
	c := l.In.Ledger.Known(id)
	return l.answer(id, c, l.In.blamed(rememberedFacts(id, c, l.Err, unread)), l.Published[id.String()])
}

// Describe is all that is reported of a volume: how it is, and where.
func (l *Listing) Describe(id volume.ID, e store.Entry, d *dir.Dir) Volume {
	if l.Err != nil {
		return l.answer(id, InfoOf(e), health.Facts{Pool: l.Err}, l.Published[id.String()])
	}
	_, facts := l.In.Measure(id, d, e, l.Space)
	facts.InlineUnpublished = l.LeftBehind(id, e)
	devices := l.devices(id, e, d)
	return l.answer(id, InfoOf(e), facts, append(slices.Clone(l.Published[id.String()]), devices...))
}

func (l *Listing) answer(id volume.ID, c ledger.Info, facts health.Facts, published []bind.Publication) Volume {
	v := l.In.Volume(id, c, l.Space)
	v.Enforced = v.Enforced && !facts.LimitDiffers
	v.Condition, v.Conditions = facts.Condition(), facts.Conditions()
	v.Nodes = l.In.Nodes(published, l.Elsewhere[id.String()])
	return v
}

// Nodes are those that have a volume published, this one first.
func (p *View) Nodes(here []bind.Publication, elsewhere []volume.NodeID) []volume.NodeID {
	if len(here) == 0 {
		return elsewhere
	}
	return append([]volume.NodeID{p.Node}, elsewhere...)
}

// devices is where the devices of a volume are published, as far as they answer. One that does
// not answer may belong to any volume, and says nothing about this one.
func (l *Listing) devices(id volume.ID, e store.Entry, d *dir.Dir) []bind.Publication {
	file, ok, err := FileOf(id, e, d)
	if err != nil || !ok {
		return nil // Measure says why
	}
	if l.attached == nil {
		attached, _ := l.In.Host.Attachments() // the sweep logs the error
		l.attached = &attached
	}
	of, _ := l.attached.Of(file)
	return of.Publications()
}
