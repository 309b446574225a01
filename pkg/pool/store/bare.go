package store

import (
	"fmt"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A pool is bare while its filesystem is too full for the layout: the driver is new there, and an
// earlier one has filled the disk. Its volumes have no records, and nothing is written but the
// mark of a volume that is removed in place.

// Bare reports whether the pool has no layout.
func (s *Store) Bare() bool { return s.own == nil }

// CreateBare opens a pool for the first time in this process that Create has no room for. It has a format
// of its own, which is written nowhere.
func CreateBare(at *Location) (*Store, *Format, error) {
	return openBare(at, func(root *dir.Dir) error {
		if err := at.Verify(root); err != nil {
			return err
		}
		return at.Nested(root)
	})
}

func openBare(at *Location, verify func(root *dir.Dir) error) (*Store, *Format, error) {
	s, err := opening{
		root:    dir.Open,
		verify:  verify,
		own:     func(*dir.Dir, string) (*dir.Dir, error) { return nil, nil },
		confirm: (*Store).CloseMode,
		rest:    func(*Store) error { return nil },
	}.open(at)
	if err != nil {
		return nil, nil, err
	}
	f, err := s.bareFormat()
	if err != nil {
		s.Close()
		return nil, nil, err
	}
	return s, f, nil
}

// bareFormat has all drivers of a node that have the directory agree on its name.
func (s *Store) bareFormat() (*Format, error) {
	root, err := s.root.ID()
	if err != nil {
		return nil, err
	}
	space, err := s.Space()
	return &Format{Version: formatVersion, UUID: fmt.Sprintf("bare-%d-%d", root.Dev, root.Ino), Foreign: space.TakenBytes(), Created: time.Now()}, err
}

// isBare makes sure that the directory is the one that was opened.
func (id *Identity) isBare(at *Location, root *dir.Dir) error {
	if err := at.Verify(root); err != nil {
		return err
	}
	here, err := root.On(id.Filesystem)
	if err != nil {
		return err
	}
	is, err := root.ID()
	if err == nil && (!here || is != *id.bare) {
		err = ErrOther
	}
	return err
}

// MarkCovered notes in the directory of a pool, durably, that another filesystem is mounted over it.
func MarkCovered(root *dir.Dir) error {
	own, err := root.Open(OwnName)
	if err != nil {
		return err
	}
	defer func() { _ = own.Close() }()
	return own.WriteFile(coveredName, nil)
}

// Covered reports whether another filesystem was mounted over the pool, when nothing was in it.
func (s *Store) Covered() (bool, error) {
	if s.Bare() {
		return false, nil
	}
	return s.own.Exists(coveredName)
}
