package pool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
)

// publishedName is the directory in which the nodes of a shared pool say what they
// have published: published/<node>/<volume id>, an empty file. Each kernel knows
// its own mounts alone, and a volume in use on any node must not be removed.
const publishedName = "published"

// lockShared keeps other nodes from deciding about a shared pool at the same time.
func (s *session) lockShared(ctx context.Context) (unlock func(), err error) {
	if !s.pool.config.Shared {
		return func() {}, nil
	}
	unlock, err = s.own.Lock(ctx, lockName)
	if errors.Is(err, syscall.EROFS) {
		return func() {}, nil // nothing can be decided
	}
	return unlock, err
}

// markPublished says that this node is about to publish a volume. Under the lock
// that deleting takes too, either this node sees the volume gone, or the other one
// sees the mark.
func (s *session) markPublished(ctx context.Context, id VolumeID) error {
	if !s.pool.config.Shared {
		return nil
	}
	unlock, err := s.lockShared(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	present, err := s.root.IsDir(id.name)
	if err != nil {
		return err
	}
	if !present {
		return fmt.Errorf("volume %s: %w any more", id, ErrNotFound)
	}
	marks, err := openNested(s.own, publishedName, s.pool.options.Node.name, (*dir.Dir).Ensure)
	if err != nil {
		return ignoreReadOnly(err)
	}
	defer func() { _ = marks.Close() }()
	return ignoreReadOnly(marks.WriteFile(id.name, nil))
}

// unmarkPublished takes the mark back once the volume is published nowhere on this
// node. As long as a device that may be the volume's does not answer, nobody can tell, and
// the mark stays for the next look: it keeps other nodes from deleting, and nobody else.
func (v *found) unmarkPublished() error {
	s := v.session
	if !s.pool.config.Shared {
		return nil
	}
	used, err := v.used()
	if errors.Is(err, loop.ErrSilent) {
		return nil
	}
	if err != nil || used {
		return err
	}
	marks, err := openNested(s.own, publishedName, s.pool.options.Node.name, (*dir.Dir).Open)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = marks.Close() }()
	err = s.drop(marks, v.id.name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return ignoreReadOnly(err)
}

// ignoreReadOnly lets a read-only pool be used: nothing can be removed from it, and
// a mark that stays is taken back when it is writable again.
func ignoreReadOnly(err error) error {
	if errors.Is(err, syscall.EROFS) {
		return nil
	}
	return err
}

// recoverMarks takes back the marks of what this node has published no more: it was
// started anew, or the pool was away when a volume was unpublished.
func (s *session) recoverMarks(ctx context.Context) error {
	marks, err := openNested(s.own, publishedName, s.pool.options.Node.name, (*dir.Dir).Open)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = marks.Close() }()
	marked, err := names(marks)
	if err != nil {
		return err
	}
	for _, name := range marked {
		if _, is := dir.Temporary(name); is {
			err = s.removeUnwritten(ctx, marks, name)
		} else if id, parseErr := ParseVolumeID(name); parseErr == nil {
			err = s.recoverMark(id)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// removeUnwritten removes a mark that was being written when a crash came. Under the lock
// that the writing is done under, it is none that still is.
func (s *session) removeUnwritten(ctx context.Context, marks *dir.Dir, name string) error {
	unlock, err := s.lockShared(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if err := marks.Remove(name); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (s *session) recoverMark(id VolumeID) error {
	unlock, err := s.pool.locks.TryLock(id)
	if err != nil {
		return nil // a call is at work on it, and sees to it
	}
	defer unlock()
	e, d, err := s.lookup(id)
	if err != nil {
		return err
	}
	if d != nil {
		defer func() { _ = d.Close() }()
	}
	return (&found{id: id, session: s, entry: e, dir: d}).unmarkPublished()
}

// publishedElsewhere is what other nodes have published, by volume. The word of a
// node that was not seen for a day counts no more.
func (s *session) publishedElsewhere() (map[string][]NodeID, error) {
	if !s.pool.config.Shared {
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
	nodes, err := names(all)
	if err != nil {
		return nil, err
	}
	published := make(map[string][]NodeID)
	for _, name := range nodes {
		node, err := ParseNodeID(name)
		if err != nil || node == s.pool.options.Node {
			continue
		}
		if err := s.addMarks(published, all, node); err != nil {
			return nil, fmt.Errorf("what node %s has published: %w", node, err)
		}
	}
	return published, nil
}

func (s *session) addMarks(published map[string][]NodeID, all *dir.Dir, node NodeID) error {
	life, err := openNested(s.own, trashName, node.name, (*dir.Dir).Open)
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
	marks, err := all.Open(node.name)
	if err != nil {
		return err
	}
	defer func() { _ = marks.Close() }()
	marked, err := names(marks)
	for _, id := range marked {
		published[id] = append(published[id], node)
	}
	return err
}
