package reconcile

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// An Index brings the ledger in line with the disk.
type Index struct {
	config   *poolconfig.Config
	node     volume.NodeID
	store    *store.Store
	ledger   *ledger.Ledger
	enforcer *limit.Enforcer
	peers    *Peers
	lock     func(volume.ID) (unlock func(), err error)
	steps    *atomic.Uint64
	log      logr.Logger
	left     func(path string, err error)
}

// Index is the ledger of the pool beside its disk.
func (p *View) Index() Index {
	return Index{p.Config, p.Node, p.Store, p.Ledger, p.Enforcer, p.Peers, p.Lock, p.Steps, p.Log, p.Left}
}

// Load fills the ledger from the disk.
func (i Index) Load() error {
	l := i.ledger.BeginLoad()
	err := i.read(l)
	l.End(err)
	return err
}

func (i Index) read(l *ledger.Load) error {
	for id, err := range i.store.Directories() {
		if err != nil {
			return err
		}
		l.Put(id, InfoOf(store.Entry{Present: true}))
	}
	some := make([]volume.ID, 0, recordsAtOnce)
	for id, err := range i.store.Records().All() {
		if err != nil {
			return err
		}
		if some = append(some, id); len(some) == recordsAtOnce {
			i.readRecords(some, l)
			some = some[:0]
		}
	}
	i.readRecords(some, l)
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
func (i Index) readRecords(of []volume.ID, to *ledger.Load) {
	entries := make([]store.Entry, len(of))
	var work sync.WaitGroup
	for first := range readers {
		work.Go(func() {
			for at := first; at < len(of); at += readers {
				i.steps.Add(1)
				entries[at].Record, entries[at].Damage = i.store.Records().Read(of[at])
			}
		})
	}
	work.Wait()
	for at, id := range of {
		e := entries[at]
		e.Present = !to.Get(id).Lost()
		if e.Damage != nil && !i.ledger.Known(id).Is(ledger.HasDamage) {
			i.log.Error(e.Damage, "Record is unreadable; calls on its volume are refused", "volume", id.String())
		}
		i.claim(id, e)
		to.Put(id, InfoOf(e))
	}
}

// LoadShared brings in what other nodes wrote.
func (i Index) LoadShared() error {
	if !i.config.Shared {
		return nil
	}
	l := i.ledger.BeginLoad()
	err := i.read(l)
	if err == nil {
		// After the records: a volume whose record was gone is in the trash by then.
		l.SetOthers(i.OthersTrash())
	}
	l.End(err)
	return err
}

// differing are the volumes of which ledger and disk say different things. Any that calls change
// meanwhile may be among them.
func (i Index) differing() ([]volume.ID, error) {
	seen := make(map[volume.ID]ledger.Flags)
	for id, err := range i.store.Directories() {
		if err != nil {
			return nil, err
		}
		seen[id] = ledger.HasDirectory
	}
	for id, err := range i.store.Records().All() {
		if err != nil {
			return nil, err
		}
		seen[id] |= ledger.HasRecord
	}
	var different []volume.ID
	for id, c := range i.ledger.Each(ledger.Info.Exists) {
		if !c.Matches(seen[id]) {
			different = append(different, id)
		}
		delete(seen, id)
	}
	return slices.AppendSeq(different, maps.Keys(seen)), nil
}

// Resync compares the ledger with the disk while the pool serves: directories that were moved here by hand appear,
// and lost ones are noticed.
func (i Index) Resync() error {
	different, err := i.differing()
	if err != nil {
		return err
	}
	for _, id := range different {
		i.steps.Add(1)
		if err := i.resync(id); err != nil {
			return err
		}
	}
	return nil
}

// resync takes one volume from the disk, unless a call works on it.
func (i Index) resync(id volume.ID) error {
	unlock, err := i.lock(id)
	if errors.Is(err, volume.ErrBusy) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	e, d, err := lookup(i.store, i.config, id)
	if d != nil {
		_ = d.Close() // opened for reading
	}
	if err != nil {
		return err
	}
	if e.Exists() && e.Lost() && !i.ledger.Known(id).Lost() {
		i.log.Error(volume.ErrNotFound, "The directory of a volume is missing; its record is kept", "volume", id.String())
	}
	i.claim(id, e)
	i.ledger.Note(id, InfoOf(e))
	return nil
}

// claim notes the id that counts a volume, and reports two records with one id.
func (i Index) claim(id volume.ID, e store.Entry) {
	if e.Record == nil || e.Record.ProjectID == 0 {
		return
	}
	project := quota.ID(e.Record.ProjectID)
	in, err := i.store.Parent(id)
	if err != nil {
		in = i.store.Root() // there are no snapshots, so no directory carries the id
	}
	if !i.enforcer.IDs.Claim(in, id.String(), project, e.Record.UID) && !i.ledger.Known(id).Recorded() {
		i.log.Error(errTwoRecords, "The size of one of them is not enforced", "volume", id.String(), "projectID", project)
	}
}

var errTwoRecords = errors.New("two volumes are recorded with one project id: copy the content of the one that is abnormal into a new volume")

// OthersTrash is what volumes that other nodes have removed may still occupy, in bytes, or
// volume.Unknown.
func (i Index) OthersTrash() int64 { return i.peers.trash(i.store, i.node.String(), i.left) }

// AllTrash is OthersTrash with what this node has removed.
func (i Index) AllTrash() int64 { return i.peers.trash(i.store, "", i.left) }

// isLimited reports whether a volume is there and the kernel enforces its size.
func isLimited(enforcer *limit.Enforcer) func(ledger.Info) bool {
	return func(c ledger.Info) bool { return c.Is(ledger.HasDirectory) && enforcer.Enforces(c) }
}
