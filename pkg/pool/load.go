package pool

import (
	"context"
	"errors"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// load fills the index from the disk.
func (v *visit) load() error {
	l := v.pool.ledger.BeginLoad()
	err := v.read(l)
	l.End(err)
	return err
}

func (v *visit) read(l *ledger.Load) error {
	for id, err := range v.store.Directories() {
		if err != nil {
			return err
		}
		l.Put(id, cardOf(store.Entry{Present: true}).Seen())
	}
	some := make([]volume.ID, 0, recordsAtOnce)
	for id, err := range v.store.Records() {
		if err != nil {
			return err
		}
		if some = append(some, id); len(some) == recordsAtOnce {
			v.readRecords(some, l)
			some = some[:0]
		}
	}
	v.readRecords(some, l)
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
func (v *visit) readRecords(of []volume.ID, to *ledger.Load) {
	entries := make([]store.Entry, len(of))
	var work sync.WaitGroup
	for first := range readers {
		work.Go(func() {
			for i := first; i < len(of); i += readers {
				v.pool.steps.Add(1)
				entries[i].Record, entries[i].Damage = v.store.ReadRecord(of[i])
			}
		})
	}
	work.Wait()
	for i, id := range of {
		e := entries[i]
		e.Present = !to.Get(id).Lost()
		if e.Damage != nil && !v.pool.ledger.Known(id).Is(ledger.HasDamage) {
			v.pool.log.Error(e.Damage, "record is unreadable; calls on its volume are refused", "volume", id.String())
		}
		v.claim(id, e)
		to.Put(id, cardOf(e).Seen())
	}
}

// loadShared brings in what other nodes wrote.
func (v *visit) loadShared() error {
	if !v.pool.config.Shared {
		return nil
	}
	l := v.pool.ledger.BeginLoad()
	err := v.read(l)
	if err == nil {
		// After the records: a volume whose record was gone is in the trash by then.
		var others int64
		others, err = v.store.OthersTrash()
		l.SetOthers(others)
	}
	l.End(err)
	return err
}

// resyncAll compares the index with the disk while the pool serves: directories that were moved
// here by hand appear, and lost ones are noticed.
func (v *visit) resyncAll(context.Context) error {
	different, err := v.differing()
	if err != nil {
		return err
	}
	for id := range different {
		v.pool.steps.Add(1)
		if err := v.resync(id); err != nil {
			return err
		}
	}
	return nil
}

// differing are the volumes of which index and disk say different things, and those that
// calls changed meanwhile. What is the same is marked in the index and remembered nowhere
// else, so that large pools cost no memory here.
func (v *visit) differing() (map[volume.ID]struct{}, error) {
	different := make(map[volume.ID]struct{})
	v.pool.ledger.Unmark()
	for id, err := range v.store.Directories() {
		if err != nil {
			return nil, err
		}
		if !v.pool.ledger.MarkDirectory(id) {
			different[id] = struct{}{}
		}
	}
	for id, err := range v.store.Records() {
		if err != nil {
			return nil, err
		}
		if !v.pool.ledger.MarkRecord(id) {
			different[id] = struct{}{}
		}
	}
	for id := range v.pool.ledger.Each(ledger.Card.Unseen) {
		different[id] = struct{}{}
	}
	return different, nil
}

// resync takes one volume from the disk, unless a call is working on it.
func (v *visit) resync(id volume.ID) error {
	unlock, err := v.tryLock(id)
	if errors.Is(err, volume.ErrBusy) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	e, d, err := v.lookup(id)
	if d != nil {
		_ = d.Close()
	}
	if err != nil {
		return err
	}
	if e.Exists() && e.Lost() && !v.pool.ledger.Known(id).Lost() {
		v.pool.log.Error(volume.ErrNotFound, "the directory of a volume is missing; its record is kept", "volume", id.String())
	}
	v.claim(id, e)
	v.pool.note(id, e)
	return nil
}
