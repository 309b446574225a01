package store

import (
	"errors"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A ParentDir is one of the two directories between which the directory of a volume moves: a pool,
// or the directory of a provisioner that keeps no records. It is opened beside the process that
// serves it, and takes no lock: the caller sees to it that no call asks for the volume meanwhile.
type ParentDir struct {
	root *dir.Dir
	pool *Store // nil without the layout of a pool
}

// OpenParentDir opens a directory, and the records that it has.
func OpenParentDir(path string) (*ParentDir, error) {
	anything := func(*dir.Dir) error { return nil }
	s, _, err := OpenReadOnly(&Location{Path: path, ReadOnly: true, Verify: anything, Nested: anything, QueueTrash: func(string) {}})
	if err == nil {
		return &ParentDir{root: s.Root(), pool: s}, nil
	}
	if !errors.Is(err, ErrNoLayout) {
		return nil, err
	}
	root, err := dir.Open(path)
	if err != nil {
		return nil, err
	}
	return &ParentDir{root: root}, nil
}

// Close closes the directories.
func (s *ParentDir) Close() {
	if s.pool != nil {
		s.pool.Close()
		return
	}
	_ = s.root.Close() // opened for reading
}

// Root is the directory.
func (s *ParentDir) Root() *dir.Dir { return s.root }

// IsPool reports whether a driver or a provisioner has served the directory, so that it has records.
func (s *ParentDir) IsPool() bool { return s.pool != nil }

// Record is that of a volume; nil if there is none. Errors: ErrDamagedRecord, ErrIO.
func (s *ParentDir) Record(name string) (*Record, error) {
	id, err := volume.ParseID(name)
	if err != nil || s.pool == nil {
		return nil, nil //nolint:nilerr // what is no volume has no record
	}
	return s.pool.Records().Read(id)
}

// Confirm records that a volume is not provisional. One without a record is not.
func (s *ParentDir) Confirm(name string) error {
	rec, err := s.Record(name)
	if err != nil || rec == nil || !rec.Provisional {
		return err
	}
	rec.Provisional = false
	return s.pool.Records().Write(rec)
}

// Take moves a directory here from the other side, under a name that is free, durably and in one step.
// After it come KeepRecord here, and then DropRecord on the other side.
func (s *ParentDir) Take(from *ParentDir, name, as string) error {
	if err := from.root.Rename(name, s.root, as); err != nil {
		return err
	}
	return s.sync(from)
}

func (s *ParentDir) sync(other *ParentDir) error {
	return errors.Join(s.root.Sync(), other.root.Sync())
}

// KeepRecord writes the record of a volume that is here, unless it has one: with what the record of the
// other side says, or else with a new one for that many bytes. The directory is made durable before.
func (s *ParentDir) KeepRecord(other *ParentDir, name, as string, bytes int64) error {
	id, err := volume.ParseID(as)
	if err != nil {
		return err
	}
	if s.pool == nil {
		return fmt.Errorf("%s: %w", s.root, ErrNoLayout)
	}
	if err := s.sync(other); err != nil {
		return err
	}
	if has, err := s.Record(as); err != nil || has != nil {
		return err
	}
	rec, err := other.Record(name)
	if err != nil {
		return err
	}
	if rec == nil {
		rec = NewRecord(id, volume.ModeMount, bytes)
	}
	rec.ID, rec.Provisional = as, false
	return s.pool.Records().Write(rec)
}

// DropRecord removes the record of a volume, durably; one that is not there is no error.
func (s *ParentDir) DropRecord(name string) error {
	id, err := volume.ParseID(name)
	if err != nil || s.pool == nil {
		return nil //nolint:nilerr // what is no volume has no record
	}
	return s.pool.Records().Drop(id)
}
