package store

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// An Entry is what the disk has of one volume.
type Entry struct {
	Record *Record // nil for a directory that came without one
	// Present: the directory is there.
	Present bool
	// Damage is why the record cannot be read; nil if it can, or if there is none.
	Damage error
}

// Exists reports whether there is anything of the volume at all.
func (e Entry) Exists() bool { return e.Present || e.Record != nil || e.Damage != nil }

// Lost is a promise whose directory is gone.
func (e Entry) Lost() bool { return !e.Present }

// Promised is the size set aside, in bytes.
func (e Entry) Promised() int64 {
	if e.Record == nil {
		return 0
	}
	return e.Record.Bytes
}

// Mode is how the volume is used. A directory without a record is one.
func (e Entry) Mode() volume.Mode {
	if e.Record == nil {
		return volume.ModeMount
	}
	return e.Record.Mode
}

// Block reports whether the volume is a block device.
func (e Entry) Block() bool { return e.Mode() == volume.ModeBlock }

// Provisional reports whether no client is known to know of the volume.
func (e Entry) Provisional() bool { return e.Record != nil && e.Record.Provisional }

// Inline reports whether the volume goes when it is unpublished.
func (e Entry) Inline() bool { return e.Record != nil && e.Record.Inline }

// UsedAs returns ErrInvalid for another mode than that of the volume.
func (e Entry) UsedAs(mode volume.Mode) error {
	if mode != e.Mode() {
		return fmt.Errorf("%w: it is requested as %s, but its mode is %s, which cannot change", volume.ErrInvalid, mode, e.Mode())
	}
	return nil
}

// Usable returns why a volume cannot be worked with; nil if it can.
func (e Entry) Usable() error {
	switch {
	case !e.Exists():
		return volume.ErrNotFound
	case e.Damage != nil:
		return e.Damage
	case e.Lost():
		return fmt.Errorf("%w: its directory is lost, only its record is left: put the directory back, from where it was moved to or from a backup; "+
			"to give the data up, delete what uses it, and then the claim or the snapshot", volume.ErrNotFound)
	}
	return nil
}

// Move is what the record says of a move; the zero Move without one.
func (e Entry) Move() Move {
	if e.Record == nil {
		return Move{}
	}
	return e.Record.Move
}

// Unmoved returns ErrPrecondition for a volume that moves between nodes: a fenced source, and a target that is not confirmed.
func (e Entry) Unmoved() error {
	switch m := e.Move(); m.Role {
	case MoveSource:
		return fmt.Errorf("%w: it is moving to node %s, and stays as it is on this node until the move %s ends or is undone", volume.ErrPrecondition, m.Peer, m.ID)
	case MoveTarget:
		return fmt.Errorf("%w: it is being copied here from node %s, and can be used when the move %s confirms it", volume.ErrPrecondition, m.Peer, m.ID)
	}
	return nil
}

// Lookup reads what the disk has of a volume. The directory, if it is not nil,
// must be closed.
func (s *Store) Lookup(id volume.ID) (Entry, *dir.Dir, error) {
	if id.String() == s.at.Reserved {
		return Entry{}, nil, nil
	}
	var e Entry
	var d *dir.Dir
	in, err := s.Parent(id)
	if err == nil {
		d, err = in.Open(id.String())
	}
	switch {
	case dir.IsMissing(err):
	case err != nil:
		return Entry{}, nil, err
	default:
		e.Present = true
	}
	e.Record, e.Damage = s.Records().Read(id)
	return e, d, nil
}

// Directories are the volumes, and then the snapshots, that the disk has a directory of.
func (s *Store) Directories() iter.Seq2[volume.ID, error] {
	volumes := s.at.directoriesIn(s.root, volume.ParseID)
	return func(yield func(volume.ID, error) bool) {
		for id, err := range volumes {
			if !yield(id, err) || err != nil {
				return
			}
		}
		in, err := s.Parent(volume.FirstSnapshot())
		if errors.Is(err, fs.ErrNotExist) {
			return
		}
		if err != nil {
			yield(volume.ID{}, err)
			return
		}
		s.at.directoriesIn(in, func(name string) (volume.ID, error) {
			id, err := volume.ParseEntry(name)
			if err == nil && !id.IsSnapshot() {
				err = volume.ErrInvalid
			}
			return id, err
		})(yield)
	}
}

// directoriesIn are the directories in one whose names are parsed.
func (at *Location) directoriesIn(d *dir.Dir, parse func(name string) (volume.ID, error)) iter.Seq2[volume.ID, error] {
	return at.volumesIn(d, func(entry dir.Entry) (volume.ID, bool) {
		id, err := parse(entry.Name)
		return id, err == nil && entry.IsDir
	})
}

// All are the volumes and snapshots that the disk has a record of.
func (r Records) All() iter.Seq2[volume.ID, error] {
	return func(yield func(volume.ID, error) bool) {
		in, err := r.store.recordsDir()
		if err != nil {
			yield(volume.ID{}, err)
			return
		}
		r.store.at.volumesIn(in, func(entry dir.Entry) (volume.ID, bool) {
			if id, ok := recordID(entry.Name); ok {
				return id, true
			}
			return bared(in, entry.Name)
		})(yield)
	}
}

// volumesIn are the entries of a directory that are of volumes. It ends at the first error.
func (at *Location) volumesIn(d *dir.Dir, of func(dir.Entry) (volume.ID, bool)) iter.Seq2[volume.ID, error] {
	return func(yield func(volume.ID, error) bool) {
		for entry, err := range d.Entries() {
			id, ok := of(entry)
			switch {
			case err != nil:
				yield(volume.ID{}, err)
				return
			case ok && id.String() != at.Reserved && !yield(id, nil):
				return
			}
		}
	}
}

// Vacant reports whether there is nothing in the pool: no volume, no record, and no node
// anything in creating/ or trash/.
func (s *Store) Vacant() (bool, error) {
	for _, volumes := range []iter.Seq2[volume.ID, error]{s.Directories(), s.Records().All()} {
		for _, err := range volumes {
			return false, err
		}
	}
	if removed, err := s.Trash().InPlace(); err != nil || len(removed) > 0 {
		return false, err
	}
	vacant := true
	for _, place := range []Place{InCreation, InTrash} {
		err := s.Nodes().EachIn(place, func(_ string, d *dir.Dir) error {
			for _, err := range d.Entries() {
				vacant = false
				return err
			}
			return nil
		})
		if err != nil {
			return false, err
		}
	}
	return vacant, nil
}

// mostLookups is how often a volume is read while calls work on it.
const mostLookups = 5

// LookupUnlocked is Lookup for a process that cannot take the lock of the volume, because the driver
// has it: what it returns was there at one time. A volume that is being made or
// removed does not exist.
func (s *Store) LookupUnlocked(id volume.ID) (Entry, *dir.Dir, error) {
	for range mostLookups {
		e, d, err := s.Lookup(id)
		if err != nil || !e.Exists() || e.Present && e.Record != nil || e.Damage != nil {
			return e, d, err
		}
		same, err := s.unchanged(id, e, d)
		if err != nil || same {
			return e, d, err
		}
		if d != nil {
			_ = d.Close()
		}
	}
	return Entry{}, nil, nil // calls work on it without a pause
}

// unchanged reads half a volume again. A record is written before its directory comes out of
// creating/, and removed after that is in the trash: so there is no moment at which a volume
// that is not lost has a record, and nothing in any of the three places, nor one at which a
// directory has no record that it should have.
func (s *Store) unchanged(id volume.ID, e Entry, d *dir.Dir) (bool, error) {
	if e.Record != nil {
		under, err := s.Nodes().inProgress(id, e.Record.UID)
		if err != nil || under {
			return false, err
		}
	}
	now, again, err := s.Lookup(id)
	if again != nil {
		defer func() { _ = again.Close() }()
	}
	if err != nil || now.Present != e.Present || (now.Record == nil) != (e.Record == nil) || now.Damage != nil {
		return false, err
	}
	if e.Record != nil {
		return now.Record.UID == e.Record.UID, nil
	}
	return dir.Same(d, again)
}

// inProgress reports whether any node has a volume in creating/ or in the trash.
func (n Nodes) inProgress(id volume.ID, uid string) (found bool, err error) {
	err = n.EachIn(InCreation, func(_ string, d *dir.Dir) error {
		there, err := d.Exists(id.String())
		found = found || there
		return err
	})
	if err != nil || found {
		return found, err
	}
	removed := func(name string) bool {
		t := ParseTrashName(name) // the promise may have grown since the record was read
		return t.Of == id.String() && t.UID == uid
	}
	err = n.EachIn(InTrash, func(_ string, d *dir.Dir) error {
		thrown, err := Names(d)
		found = found || slices.ContainsFunc(thrown, removed)
		return err
	})
	if err != nil || found {
		return found, err
	}
	here, err := n.store.Trash().InPlace()
	return slices.ContainsFunc(here, removed), err
}

// A Place is a directory of the layout in which each node has one of its own.
type Place string

// The places.
const (
	InCreation Place = creatingName // what is being made
	InTrash    Place = trashName    // what is being erased
)

// EachIn opens what the nodes have in one place of the layout, in the order of their names; nothing if no node has made that. An error at
// one node keeps it from none of the others.
func (n Nodes) EachIn(place Place, do func(node string, d *dir.Dir) error) error {
	all, err := n.store.own.Open(string(place))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = all.Close() }() // opened for reading
	nodes, err := Names(all)
	if err != nil {
		return err
	}
	slices.Sort(nodes)
	var problems []error
	for _, node := range nodes {
		d, err := all.Open(node)
		switch {
		case dir.IsMissing(err):
		case err != nil:
			problems = append(problems, err)
		default:
			problems = append(problems, do(node, d), d.Close())
		}
	}
	return errors.Join(problems...)
}

// Names are the names of a directory's entries.
func Names(d *dir.Dir) ([]string, error) {
	var all []string
	for entry, err := range d.Entries() {
		if err != nil {
			return nil, err
		}
		all = append(all, entry.Name)
	}
	return all, nil
}
