package store

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// PromisesByte is the byte that keeps others from promising anything. The nodes of a shared pool lock bytes of one file, which has none. The first is for
// promises. Each volume has another: what takes long, as allocating a disk does, then holds
// up nobody who works on other volumes. Of two volumes with the same byte one may wait for
// the other, and no more.
const PromisesByte = 0

// VolumeByte is the byte of a volume.
func VolumeByte(id volume.ID) int64 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, id.String()) // never fails
	return 1 + int64(h.Sum64()>>2)
}

// LockByte waits for a byte of the lock file of a shared pool until ctx ends.
func (s *Store) LockByte(ctx context.Context, at int64) (unlock func(), err error) {
	if !s.at.Shared || s.at.ReadOnly {
		return func() {}, nil
	}
	unlock, err = s.own.LockByte(ctx, lockName, at)
	if errors.Is(err, syscall.EROFS) {
		return func() {}, nil // nothing can be changed
	}
	return unlock, err
}

// TryLockByte is LockByte that answers ErrBusy instead of waiting.
func (s *Store) TryLockByte(at int64) (unlock func(), err error) {
	if !s.at.Shared || s.at.ReadOnly {
		return func() {}, nil
	}
	unlock, err = s.own.TryLockByte(lockName, at)
	switch {
	case errors.Is(err, syscall.EROFS):
		return func() {}, nil
	case errors.Is(err, dir.ErrLocked):
		return nil, fmt.Errorf("%w, by another node", volume.ErrBusy)
	}
	return unlock, err
}

// Mark says that this node is about to publish a volume. The caller has locked that on all
// nodes, as deleting does: either this node has seen the volume gone, or the other one sees
// the mark.
func (s *Store) Mark(id volume.ID) error {
	if !s.at.Shared {
		return nil
	}
	marks, err := openNested(s.own, publishedName, s.at.Node.String(), (*dir.Dir).Ensure)
	if err != nil {
		return IgnoreReadOnly(err)
	}
	defer func() { _ = marks.Close() }()
	return IgnoreReadOnly(marks.WriteFile(id.String(), nil))
}

// Unmark removes the mark of this node.
func (s *Store) Unmark(id volume.ID) error {
	marks, err := s.marks()
	if err != nil || marks == nil {
		return err
	}
	defer func() { _ = marks.Close() }()
	err = s.drop(marks, id.String())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return IgnoreReadOnly(err)
}

// marks opens those of this node; nil if there are none.
func (s *Store) marks() (*dir.Dir, error) {
	marks, err := openNested(s.own, publishedName, s.at.Node.String(), (*dir.Dir).Open)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return marks, err
}

// RecoverMarks goes over the marks of this node. One that was being written is handed to
// unwritten, with what removes it, and the volume of each other to marked.
func (s *Store) RecoverMarks(unwritten func(of volume.ID, remove func() error) error, marked func(volume.ID) error) error {
	marks, err := s.marks()
	if err != nil || marks == nil {
		return err
	}
	defer func() { _ = marks.Close() }()
	all, err := Names(marks)
	if err != nil {
		return err
	}
	for _, name := range all {
		if to, is := dir.Temporary(name); is {
			id, _ := volume.ParseID(to) // the zero id is that of no call
			err = unwritten(id, func() error {
				if err := marks.Remove(name); !errors.Is(err, fs.ErrNotExist) {
					return err
				}
				return nil
			})
		} else if id, parseErr := volume.ParseID(name); parseErr == nil {
			err = marked(id)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// PublishedElsewhere is what other nodes have published, by volume. The word of a
// node that was not seen for a day counts no more.
func (s *Store) PublishedElsewhere() (map[string][]volume.NodeID, error) {
	if !s.at.Shared {
		return nil, nil
	}
	all, err := s.own.Open(publishedName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = all.Close() }()
	nodes, err := Names(all)
	if err != nil {
		return nil, err
	}
	published := make(map[string][]volume.NodeID)
	for _, name := range nodes {
		node, err := volume.ParseNodeID(name)
		if err != nil || node == s.at.Node {
			continue
		}
		if err := s.addMarks(published, all, node); err != nil {
			return nil, fmt.Errorf("what node %s has published: %w", node, err)
		}
	}
	return published, nil
}

func (s *Store) addMarks(published map[string][]volume.NodeID, all *dir.Dir, node volume.NodeID) error {
	life, err := openNested(s.own, trashName, node.String(), (*dir.Dir).Open)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // without a sign of life
	}
	if err != nil {
		return err
	}
	defer func() { _ = life.Close() }()
	if alive, err := seenLately(life); err != nil || !alive {
		return err
	}
	marks, err := all.Open(node.String())
	if err != nil {
		return err
	}
	defer func() { _ = marks.Close() }()
	marked, err := Names(marks)
	for _, id := range marked {
		published[id] = append(published[id], node)
	}
	return err
}

// OthersTrash is what volumes that other nodes have removed may still occupy, in bytes, or
// volume.Unknown.
func (s *Store) OthersTrash() (held int64, err error) {
	seen := make(map[any]bool)
	err = s.EachNode(InTrash, func(node string, trash *dir.Dir) error {
		if node == s.at.Node.String() {
			return nil
		}
		thrown, err := Names(trash)
		for _, name := range thrown {
			seen[node+"/"+name] = true
			if bytes := s.heldBy(trash, node, name); bytes == volume.Unknown || held == volume.Unknown {
				held = volume.Unknown
			} else {
				held += bytes
			}
		}
		return err
	})
	s.at.measured.Range(func(key, _ any) bool {
		if !seen[key] {
			s.at.measured.Delete(key)
		}
		return true
	})
	return held, err
}

// UnseenAfter is when what another node of a shared pool left unfinished is taken
// over. The clocks of nodes differ by less.
const UnseenAfter = 24 * time.Hour

// seenLately reports whether a node is alive by its trash directory.
func seenLately(trash *dir.Dir) (bool, error) {
	seen, err := trash.Modified()
	return time.Since(seen) < UnseenAfter, err
}

// Touch shows the other nodes that this one is alive: its trash directory is its sign of life.
func (s *Store) Touch() error { return s.trash.Touch() }

// EachLeft goes over what other nodes left, or only those that were not seen for a day, with
// creating/ and trash/ of each.
func (s *Store) EachLeft(goneOnly bool, do func(node string, creating, trash *dir.Dir) error) error {
	trash, err := s.own.Open(trashName)
	if err != nil {
		return err
	}
	defer func() { _ = trash.Close() }()
	var problems []error
	for entry, err := range trash.Entries() {
		if err != nil {
			return err
		}
		if entry.IsDir && entry.Name != s.at.Node.String() {
			problems = append(problems, s.left(trash, entry.Name, goneOnly, do))
		}
	}
	return errors.Join(problems...)
}

func (s *Store) left(trash *dir.Dir, node string, goneOnly bool, do func(node string, creating, trash *dir.Dir) error) error {
	left, err := trash.Open(node)
	if err != nil {
		return err
	}
	defer func() { _ = left.Close() }()
	if alive, err := seenLately(left); err != nil || alive && goneOnly {
		return err
	}
	creating, err := openNested(s.own, creatingName, node, (*dir.Dir).Ensure)
	if err != nil {
		return err
	}
	defer func() { _ = creating.Close() }()
	return do(node, creating, left)
}
