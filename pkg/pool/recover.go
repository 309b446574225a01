package pool

import (
	"context"
	"errors"
	"io/fs"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// recover finishes or undoes what a crash interrupted. A read-only pool has nothing to
// recover that could be. What a call is at work on is left to that.
func (s *session) recover() error {
	space, err := s.space()
	if err != nil {
		return err
	}
	if space.ReadOnly {
		s.pool.unrecovered = true
		return nil
	}
	if err := errors.Join(s.recoverRecords(), s.recoverStaging(s.staging), s.recoverTrash()); err != nil {
		return err
	}
	if !s.pool.config.Shared {
		// What is of another node is of this one under an earlier name, or the disk
		// came from another machine.
		return s.takeOverAll(false)
	}
	return nil
}

// recoverRecords removes records that were being written.
func (s *session) recoverRecords() error {
	for entry, err := range s.volumes.Entries() {
		if err != nil {
			return err
		}
		if to, is := dir.Temporary(entry.Name); is {
			if err := s.recoverRecord(entry.Name, to); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *session) recoverRecord(unwritten, to string) error {
	remove := func() error {
		err := s.drop(s.volumes, unwritten)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the call that was writing it has ended
		}
		return err
	}
	id, ok := recordID(to)
	if !ok {
		return remove() // not a record's: no call writes it
	}
	return s.unlessBusy(id, remove)
}

// unlessBusy is Pool.unlessBusy for what other nodes of a shared pool may be at work on too.
func (s *session) unlessBusy(id VolumeID, do func() error) error {
	return s.pool.unlessBusy(id, func() error {
		unlock, err := s.tryLockByte(volumeByte(id))
		if errors.Is(err, ErrBusy) {
			s.pool.skipped = true
			return nil
		}
		if err != nil {
			return err
		}
		defer unlock()
		return do()
	})
}

// unlessBusy does something about a volume, unless a call is at work on it: then it is skipped.
// Before the pool was opened none can be: whoever holds the lock is at work in another pool.
func (p *Pool) unlessBusy(id VolumeID, do func() error) error {
	unlock, err := p.locks.TryLock(id)
	switch {
	case err == nil:
		defer unlock()
	case p.identity.Load() != nil:
		p.skipped = true
		return nil
	}
	return do()
}

// recoverStaging undoes the creations that a staging directory has: none of them was
// answered.
func (s *session) recoverStaging(staging *dir.Dir) error {
	staged, err := names(staging)
	if err != nil {
		return err
	}
	for _, name := range staged {
		s.pool.steps.Add(1)
		if err := s.recoverStaged(staging, name); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) recoverStaged(staging *dir.Dir, name string) error {
	undo := func() error {
		// The call that was making it may have ended since the names were read.
		if exists, err := staging.Exists(name); err != nil || !exists {
			return err
		}
		s.pool.log.Info("undoing a creation that was interrupted", "volume", name, "in", staging.String())
		return s.undoNamed(staging, name)
	}
	id, err := ParseVolumeID(name)
	if err != nil {
		return undo()
	}
	return s.unlessBusy(id, undo)
}

// undoNamed undoes the creation that an entry of a staging directory is of.
func (s *session) undoNamed(staging *dir.Dir, name string) error {
	if id, err := ParseVolumeID(name); err == nil {
		if err := s.undoRecord(id); err != nil {
			return err
		}
	}
	return s.throwStaged(staging, name)
}

// undoStaged undoes a creation of this node, the record first: what is in staging
// is the sign that there is something to undo.
func (s *session) undoStaged(id VolumeID) error {
	if err := s.undoRecord(id); err != nil {
		return err
	}
	return s.discardStaging(id.name)
}

// undoRecord drops the record of a creation that had not put its directory in place.
func (s *session) undoRecord(id VolumeID) error {
	present, err := s.root.IsDir(id.name)
	if err != nil || present {
		return err
	}
	return s.dropRecord(id)
}

// recoverTrash finishes removals that had not dropped their record, and queues all trash
// that was not known: from before a start, and of volumes whose deletion failed. Where
// nobody counts what it holds, all use counts as foreign until it is gone.
func (s *session) recoverTrash() error {
	thrown, err := names(s.trash)
	if err != nil {
		return err
	}
	for _, name := range thrown {
		if s.pool.knowsTrash(name) {
			continue
		}
		s.pool.steps.Add(1)
		if err := s.recoverTrashed(name); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) recoverTrashed(name string) error {
	queue := func() error {
		erased := s.pool.erased.pieces.Load()
		// The reaper may have erased and forgotten it since the trash was listed.
		if exists, err := s.trash.Exists(name); err != nil || !exists {
			return err
		}
		if err := s.finishRemoval(name); err != nil {
			return err
		}
		id, err := s.idIn(s.trash, name)
		if err != nil {
			return err
		}
		s.claims.try(id, name[strings.LastIndexByte(name, '.')+1:])
		s.pool.foundTrash(name, s.trashBytes(id), erased)
		return nil
	}
	id, ok := trashedID(name)
	if !ok {
		return queue()
	}
	return s.unlessBusy(id, queue)
}

// trashBytes is what a piece of trash still occupies, where that is counted.
func (s *session) trashBytes(id quota.ID) int64 {
	if id == 0 {
		return unknownBytes
	}
	usage, err := s.quota.Usage(s.root, id)
	if err != nil {
		return unknownBytes
	}
	return usage.Bytes
}

// finishRemoval drops the record of a volume that is in the trash. Nothing may be
// erased before that: see remove.
func (s *session) finishRemoval(name string) error {
	id, ok := trashedID(name)
	if !ok {
		return nil // not a volume's: it is only removed
	}
	e, d, err := s.lookup(id)
	if d != nil {
		_ = d.Close()
	}
	if err != nil || e.present || e.record == nil || e.record.UID != name[len(id.name)+1:] {
		return err
	}
	s.pool.log.Info("finished a removal that was interrupted", "volume", id.name)
	if err := s.dropRecord(id); err != nil {
		return err
	}
	s.pool.note(id, entry{})
	return nil
}

// trashedID is the volume that a piece of trash was, if it was one.
func trashedID(name string) (VolumeID, bool) {
	at := strings.LastIndexByte(name, '.')
	if at < 0 {
		return VolumeID{}, false
	}
	id, err := ParseVolumeID(name[:at])
	return id, err == nil
}

// A load is a reading of the disk. What calls of this node say of a volume meanwhile counts
// more than what it reads. Of two loads that overlap the one counts that began later. What
// other nodes do while both read may then be seen by the next load only. So who sells space
// of a shared pool loads it under the lock, without which no other node promises anything.
type load struct {
	index  index
	others bool                  // other nodes have trash
	told   map[VolumeID]struct{} // what calls have said something of
	passed bool                  // one that began later is over
}

// beginLoad has a load be told of what calls say, until its end.
func (p *Pool) beginLoad() *load {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := &load{others: p.ledger.others, told: maps.Clone(p.kept)}
	if l.told == nil {
		l.told = make(ids)
	}
	p.loads = append(p.loads, l)
	return l
}

// endLoad takes over what was read, unless that failed.
func (p *Pool) endLoad(l *load, err error) {
	p.mu.Lock()
	defer p.unlock()
	at := slices.Index(p.loads, l)
	earlier := p.loads[:at]
	p.loads = slices.Delete(p.loads, at, at+1)
	if err != nil || l.passed {
		return
	}
	for _, other := range earlier {
		other.passed = true
	}
	for id := range l.told {
		l.index.put(id, p.index.get(id))
	}
	p.ledger.promised += l.index.promised - p.index.promised
	p.ledger.others = l.others
	p.index = l.index
}

// load fills the index from the disk.
func (s *session) load() error {
	l := s.pool.beginLoad()
	err := s.read(l)
	s.pool.endLoad(l, err)
	return err
}

func (s *session) read(l *load) error {
	for id, err := range s.directories() {
		if err != nil {
			return err
		}
		l.index.put(id, entry{present: true}.card().seen())
	}
	some := make([]VolumeID, 0, recordsAtOnce)
	for id, err := range s.recorded() {
		if err != nil {
			return err
		}
		if some = append(some, id); len(some) == recordsAtOnce {
			s.readRecords(some, &l.index)
			some = some[:0]
		}
	}
	s.readRecords(some, &l.index)
	return nil
}

const (
	// readers is how many records are read at a time, so that a disk has several requests
	// to order, and each CPU one to parse.
	readers = 8
	// recordsAtOnce is how many are in memory, with all that they say.
	recordsAtOnce = 1024
)

// readRecords adds what some records say to an index of the directories.
func (s *session) readRecords(of []VolumeID, to *index) {
	entries := make([]entry, len(of))
	var work sync.WaitGroup
	for first := range readers {
		work.Go(func() {
			for i := first; i < len(of); i += readers {
				s.pool.steps.Add(1)
				entries[i].record, entries[i].damage = readRecord(s.volumes, of[i])
			}
		})
	}
	work.Wait()
	for i, id := range of {
		e := entries[i]
		e.present = !to.get(id).lost()
		if e.damage != nil && !s.pool.known(id).is(hasDamage) {
			s.pool.log.Error(e.damage, "the record is kept aside, calls on its volume are refused", "volume", id.name)
		}
		s.claim(id, e)
		to.put(id, e.card().seen())
	}
}

// loadShared brings in what other nodes wrote.
func (s *session) loadShared() error {
	if !s.pool.config.Shared {
		return nil
	}
	l := s.pool.beginLoad()
	err := s.read(l)
	if err == nil {
		// After the records: a volume whose record was gone is in the trash by then.
		l.others, err = s.othersTrash()
	}
	s.pool.endLoad(l, err)
	return err
}

// othersTrash tells whether other nodes have removed volumes that still occupy space.
func (s *session) othersTrash() (bool, error) {
	trash, err := s.own.Open(trashName)
	if err != nil {
		return false, err
	}
	defer func() { _ = trash.Close() }()
	nodes, err := names(trash)
	if err != nil {
		return false, err
	}
	for _, node := range nodes {
		if node == s.pool.options.Node.name {
			continue
		}
		left, err := trash.Open(node)
		if isMissing(err) {
			continue
		}
		if err != nil {
			return false, err
		}
		thrown, err := names(left)
		if err := errors.Join(err, left.Close()); err != nil || len(thrown) > 0 {
			return true, err
		}
	}
	return false, nil
}

// directories are the volumes that the disk has a directory of.
func (s *session) directories() iter.Seq2[VolumeID, error] {
	return s.volumesIn(s.root, func(entry dir.Entry) (VolumeID, bool) {
		id, err := ParseVolumeID(entry.Name)
		return id, err == nil && entry.IsDir
	})
}

// recorded are the volumes that the disk has a record of.
func (s *session) recorded() iter.Seq2[VolumeID, error] {
	return s.volumesIn(s.volumes, func(entry dir.Entry) (VolumeID, bool) { return recordID(entry.Name) })
}

// volumesIn are the entries of a directory that are of volumes. It ends at the first error.
func (s *session) volumesIn(d *dir.Dir, of func(dir.Entry) (VolumeID, bool)) iter.Seq2[VolumeID, error] {
	return func(yield func(VolumeID, error) bool) {
		for entry, err := range d.Entries() {
			id, ok := of(entry)
			switch {
			case err != nil:
				yield(VolumeID{}, err)
				return
			case ok && id.name != s.pool.reserved && !yield(id, nil):
				return
			}
		}
	}
}

// sync compares the index with the disk while the pool serves: directories that
// were moved here by hand appear, lost ones are noticed, and what failed calls
// left in staging goes.
func (s *session) sync(ctx context.Context) error {
	different, err := s.differing()
	if err != nil {
		return err
	}
	for id := range different {
		s.pool.steps.Add(1)
		if err := s.resync(id); err != nil {
			return err
		}
	}
	if space, err := s.space(); err != nil || space.ReadOnly {
		return err
	}
	if err := s.work(); err != nil {
		return err
	}
	if err := errors.Join(s.recoverStaging(s.staging), s.recoverTrash()); err != nil {
		return err
	}
	s.sweepDevices(ctx)
	if !s.pool.config.Shared {
		return nil
	}
	s.takeOver()
	return s.recoverMarks()
}

type ids map[VolumeID]struct{}

// differing are the volumes of which index and disk say different things, and those that
// calls changed meanwhile. What is the same is marked in the index and remembered nowhere
// else, so that large pools cost no memory here.
func (s *session) differing() (ids, error) {
	different := make(ids)
	s.pool.unmark()
	for id, err := range s.directories() {
		if err != nil {
			return nil, err
		}
		if !s.pool.mark(id, sawDirectory) {
			different[id] = struct{}{}
		}
	}
	for id, err := range s.recorded() {
		if err != nil {
			return nil, err
		}
		if !s.pool.mark(id, sawRecord) {
			different[id] = struct{}{}
		}
	}
	for id := range s.pool.each(card.unlikeSeen) {
		different[id] = struct{}{}
	}
	return different, nil
}

func (p *Pool) unmark() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.index.unmark()
}

func (p *Pool) mark(id VolumeID, saw flags) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.index.mark(id, saw)
}

// resync takes one volume from the disk, unless a call is working on it.
func (s *session) resync(id VolumeID) error {
	unlock, err := s.tryLock(id)
	if errors.Is(err, ErrBusy) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	e, d, err := s.lookup(id)
	if d != nil {
		_ = d.Close()
	}
	if err != nil {
		return err
	}
	if e.exists() && e.lost() && !s.pool.known(id).lost() {
		s.pool.log.Error(ErrNotFound, "the directory of a volume is lost, its record is kept", "volume", id.name)
	}
	s.claim(id, e)
	s.pool.note(id, e)
	return nil
}

func names(d *dir.Dir) ([]string, error) {
	var all []string
	for entry, err := range d.Entries() {
		if err != nil {
			return nil, err
		}
		all = append(all, entry.Name)
	}
	return all, nil
}
