package reconcile

import (
	"errors"
	"iter"
	"maps"
	"slices"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Load fills the index from the disk.
func (p *Pool) Load() error {
	l := p.Ledger.BeginLoad()
	err := p.read(l)
	l.End(err)
	return err
}

func (p *Pool) read(l *ledger.Load) error {
	for id, err := range p.Store.Directories() {
		if err != nil {
			return err
		}
		l.Put(id, CardOf(store.Entry{Present: true}))
	}
	some := make([]volume.ID, 0, recordsAtOnce)
	for id, err := range p.Store.Records().All() {
		if err != nil {
			return err
		}
		if some = append(some, id); len(some) == recordsAtOnce {
			p.readRecords(some, l)
			some = some[:0]
		}
	}
	p.readRecords(some, l)
	return nil
}

const (
	// readers is how many records are read at a time, so that a disk has several requests
	// to order, and each CPU one to parse.
	readers = 8
	// recordsAtOnce is how many are in memory, with all that they say.
	recordsAtOnce = 1024
)

// readRecords adds what some records say to a load of the directories.
func (p *Pool) readRecords(of []volume.ID, to *ledger.Load) {
	entries := make([]store.Entry, len(of))
	var work sync.WaitGroup
	for first := range readers {
		work.Go(func() {
			for i := first; i < len(of); i += readers {
				p.Steps.Add(1)
				entries[i].Record, entries[i].Damage = p.Store.Records().Read(of[i])
			}
		})
	}
	work.Wait()
	for i, id := range of {
		e := entries[i]
		e.Present = !to.Get(id).Lost()
		if e.Damage != nil && !p.Ledger.Known(id).Is(ledger.HasDamage) {
			p.Log.Error(e.Damage, "Record is unreadable; calls on its volume are refused", "volume", id.String())
		}
		p.Claim(id, e)
		to.Put(id, CardOf(e))
	}
}

// LoadShared brings in what other nodes wrote.
func (p *Pool) LoadShared() error {
	if !p.Config.Shared {
		return nil
	}
	l := p.Ledger.BeginLoad()
	err := p.read(l)
	if err == nil {
		// After the records: a volume whose record was gone is in the trash by then.
		l.SetOthers(p.OthersTrash())
	}
	l.End(err)
	return err
}

// differing are the volumes of which index and disk say different things. Any that calls change
// meanwhile may be among them.
func (p *Pool) differing() ([]volume.ID, error) {
	seen := make(map[volume.ID]ledger.Flags)
	for id, err := range p.Store.Directories() {
		if err != nil {
			return nil, err
		}
		seen[id] = ledger.HasDirectory
	}
	for id, err := range p.Store.Records().All() {
		if err != nil {
			return nil, err
		}
		seen[id] |= ledger.HasRecord
	}
	var different []volume.ID
	for id, c := range p.Ledger.Each(ledger.Card.Exists) {
		if !c.Matches(seen[id]) {
			different = append(different, id)
		}
		delete(seen, id)
	}
	return slices.AppendSeq(different, maps.Keys(seen)), nil
}

// Resync compares the index with the disk while the pool serves: directories that were moved here by hand appear,
// and lost ones are noticed.
func (p *Pool) Resync() error {
	different, err := p.differing()
	if err != nil {
		return err
	}
	for _, id := range different {
		p.Steps.Add(1)
		if err := p.resync(id); err != nil {
			return err
		}
	}
	return nil
}

// resync takes one volume from the disk, unless a call works on it.
func (p *Pool) resync(id volume.ID) error {
	unlock, err := p.Lock(id)
	if errors.Is(err, volume.ErrBusy) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	e, d, err := p.Lookup(id)
	if d != nil {
		_ = d.Close() // opened for reading
	}
	if err != nil {
		return err
	}
	if e.Exists() && e.Lost() && !p.Ledger.Known(id).Lost() {
		p.Log.Error(volume.ErrNotFound, "The directory of a volume is missing; its record is kept", "volume", id.String())
	}
	p.Claim(id, e)
	p.Ledger.Note(id, CardOf(e))
	return nil
}

// Claim notes the id that counts a volume, and reports two records with one id.
func (p *Pool) Claim(id volume.ID, e store.Entry) {
	if e.Record == nil || e.Record.ProjectID == 0 {
		return
	}
	project := quota.ID(e.Record.ProjectID)
	in, err := p.Store.Parent(id)
	if err != nil {
		in = p.Store.Root() // there are no snapshots, so no directory carries the id
	}
	if !p.Keeper.IDs.Claim(in, id.String(), project, e.Record.UID) && !p.Ledger.Known(id).Recorded() {
		p.Log.Error(errTwoRecords, "The size of one of them is not enforced", "volume", id.String(), "projectID", project)
	}
}

var errTwoRecords = errors.New("two volumes are recorded with one project id: copy the content of the one that is abnormal into a new volume")

// Keeps reports whether the volume is there and the kernel enforces its size.
func (p *Pool) Keeps(c ledger.Card) bool { return c.Is(ledger.HasDirectory) && p.Keeper.Enforces(c) }

// Limited are the volumes whose size is enforced.
func (p *Pool) Limited() iter.Seq2[volume.ID, ledger.Card] { return p.Ledger.Each(p.Keeps) }
