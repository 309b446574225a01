package store

import (
	"errors"
	"io/fs"
	"iter"
	"path"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Unwritten are the records that were being written, each with the volume that it is of; the
// zero id if it is of none, and then no call writes it. What a record was to become is among them.
func (r Records) Unwritten() iter.Seq2[Temporary, error] {
	return func(yield func(Temporary, error) bool) {
		in, err := r.store.recordsDir()
		if err != nil {
			yield(Temporary{}, err)
			return
		}
		for entry, err := range in.Entries() {
			if err != nil {
				yield(Temporary{}, err)
				return
			}
			to, is := dir.Temporary(entry.Name)
			if !is {
				to = entry.Name
			}
			id, ofVolume := writtenID(to)
			if is = is || ofVolume && isNext(to); is && !yield(Temporary{in, entry.Name, id}, nil) {
				return
			}
		}
	}
}

// A Temporary is a file that was being written.
type Temporary struct {
	in   *dir.Dir
	name string
	// Of is the volume that it is about; the zero id for none.
	Of volume.ID
}

// String is its path.
func (t Temporary) String() string { return path.Join(t.in.String(), t.name) }

// RemoveUnwritten removes a record that was being written, but for what one that is fenced may become. That it is gone is no error: the
// call that was writing it has ended. The caller holds the lock of the volume.
func (r Records) RemoveUnwritten(t Temporary) error {
	if _, unwritten := dir.Temporary(t.name); !unwritten {
		rec, err := r.Read(t.Of)
		if _, is := bared(t.in, t.name); is || err != nil || rec != nil && rec.Move.Role == MoveSource {
			return nil //nolint:nilerr // what a record that cannot be read may become is kept
		}
	}
	err := r.store.Trash().drop(t.in, t.name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// FinishRemoval drops the record of a volume that is in a directory of trash, and reports whether there
// was one. Nothing may be erased before that: see Remove, which may have been killed before it made the removal durable.
func (t Trash) FinishRemoval(trash *dir.Dir, name string) (id volume.ID, dropped bool, err error) {
	thrown := ParseTrashName(name)
	id, ok := thrown.Volume()
	if !ok {
		return id, false, nil // not a volume's: it is only removed
	}
	// The record first: most trash has none, and is erased also where the volume that has its name now cannot be read.
	rec, err := t.store.Records().Read(id)
	if err != nil || rec == nil || rec.UID != thrown.UID {
		return id, false, nil //nolint:nilerr // a record that cannot be read is kept
	}
	in, err := t.store.Parent(id)
	if err != nil {
		return id, false, err
	}
	if present, err := in.IsDir(id.String()); err != nil || present {
		return id, false, err
	}
	if err := errors.Join(trash.Sync(), in.Sync()); err != nil {
		return id, false, err
	}
	return id, true, t.store.Records().Drop(id)
}

// IsEmpty reports whether what is in creating/ by a name has nothing in it that may occupy space,
// or is not there.
func IsEmpty(creating *dir.Dir, name string) (bool, error) {
	d, err := creating.Open(name)
	if dir.IsMissing(err) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = d.Close() }()
	for _, err := range d.Entries() {
		return false, err
	}
	return true, nil
}
