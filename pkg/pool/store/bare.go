package store

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A pool is bare while its filesystem is too full for the layout: the driver is new there, and an
// earlier one has filled the disk. Its volumes have no records, and nothing is written but what is removed in
// place, and what a node of a shared pool has published. Such a pool has no file whose bytes could be locked
// against other nodes: its directory is locked, for all volumes together, and also while a node makes the layout. So
// whoever has that lock and finds no layout knows that nobody works by the layout's locks.

// Bare reports whether the pool has no layout.
func (s *Store) Bare() bool { return s.own == nil }

// errNoSharedLocks reports a filesystem whose nodes cannot lock a pool without a layout.
var errNoSharedLocks = fmt.Errorf("%w, and its nodes cannot lock a directory against each other", ErrNoRoom)

// CreateBare opens a pool for the first time in this process that Create has no room for. It has a format
// of its own, which is written nowhere. Errors: ErrNoRoom for a shared pool that nodes cannot lock.
func CreateBare(at *Location) (*Store, *Format, error) {
	return openBare(at, func(root *dir.Dir) error {
		if err := at.Verify(root); err != nil {
			return err
		}
		if can, err := root.CanLockDir(); err != nil || at.Shared && !can {
			return cmp.Or(err, errNoSharedLocks)
		}
		return at.Nested(root)
	})
}

// errEquipped reports a pool that has a layout by now: a check opens it anew.
var errEquipped = fmt.Errorf("%w: a node has just made the layout of the pool", volume.ErrUnavailable)

// lockBare takes the place of the bytes of a lock file.
func (s *Store) lockBare(lock func(*dir.Dir) (func(), error)) (unlock func(), err error) {
	unlock, err = lock(s.root)
	if err != nil {
		return nil, err
	}
	equipped, err := hasLayout(s.root)
	if err == nil && equipped {
		err = errEquipped
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// hasLayout reports whether Create has made all that a pool needs to be no bare one.
func hasLayout(root *dir.Dir) (bool, error) {
	own, err := root.Open(OwnName)
	if dir.IsMissing(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = own.Close() }() // opened for reading
	if has, err := own.Exists(formatName); err != nil || !has {
		return false, err
	}
	return own.Exists(volumesName)
}

// lockLayout excludes those who work in a shared pool without a layout from one who is about to make that.
func (at *Location) lockLayout(ctx context.Context) (unlock func(), err error) {
	none := func() {}
	if !at.Shared {
		return none, nil
	}
	root, err := dir.Open(at.Path)
	if dir.IsMissing(err) {
		return none, nil // nobody works there
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }()
	if has, err := hasLayout(root); err != nil || has {
		return none, err
	}
	if can, err := root.CanLockDir(); err != nil || !can {
		return none, err
	}
	return root.LockDir(ctx)
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
