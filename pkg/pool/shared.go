package pool

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
)

// publishedName is the directory in which the nodes of a shared pool say what they
// have published: published/<node>/<volume id>, an empty file. Each kernel knows
// its own mounts alone, and a volume in use on any node must not be removed.
const publishedName = "published"

// The nodes of a shared pool lock bytes of one file, which has none. The first is for
// promises. Each volume has another: what takes long, as allocating a disk does, then holds
// up nobody who works on other volumes. Of two volumes with the same byte one may wait for
// the other, and no more.
const promisesByte = 0

func volumeByte(id VolumeID) int64 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, id.name) // never fails
	return 1 + int64(h.Sum64()>>2)
}

// locksNodes tells whether locks have to hold against other nodes.
func (s *session) locksNodes() bool { return s.pool.config.Shared && !s.pool.beside }

// lockByte waits for a byte of the lock file of a shared pool until ctx ends.
func (s *session) lockByte(ctx context.Context, at int64) (unlock func(), err error) {
	if !s.locksNodes() {
		return func() {}, nil
	}
	unlock, err = s.own.LockByte(ctx, lockName, at)
	if errors.Is(err, syscall.EROFS) {
		return func() {}, nil // nothing can be changed
	}
	return unlock, err
}

// tryLockByte is lockByte that answers ErrBusy instead of waiting.
func (s *session) tryLockByte(at int64) (unlock func(), err error) {
	if !s.locksNodes() {
		return func() {}, nil
	}
	unlock, err = s.own.TryLockByte(lockName, at)
	switch {
	case errors.Is(err, syscall.EROFS):
		return func() {}, nil
	case errors.Is(err, dir.ErrLocked):
		return nil, fmt.Errorf("%w, by another node", ErrBusy)
	}
	return unlock, err
}

// lockNodes extends the lock that the caller has of a volume to all nodes of a shared pool.
func (s *session) lockNodes(ctx context.Context, id VolumeID) (unlock func(), err error) {
	return s.lockByte(ctx, volumeByte(id))
}

// tryLock takes a volume on this node, and in a shared pool on all, or answers ErrBusy at once.
func (s *session) tryLock(id VolumeID) (unlock func(), err error) {
	unlockHere, err := s.pool.locks.TryLock(id)
	if err != nil {
		return nil, err
	}
	unlockNodes, err := s.tryLockByte(volumeByte(id))
	if err != nil {
		unlockHere()
		return nil, err
	}
	return func() { unlockNodes(); unlockHere() }, nil
}

// lockToPromise extends the lock that the caller has of a volume to all nodes of a shared
// pool, and keeps those from promising anything. While it waits for one of the two it does
// not have the other: a volume is published while its growth waits for a disk that another
// node allocates, and volumes are made while that of a node which hangs is waited for.
func (s *session) lockToPromise(ctx context.Context, id VolumeID) (unlock func(), err error) {
	for {
		unlockPromises, err := s.lockByte(ctx, promisesByte)
		if err != nil {
			return nil, err
		}
		unlockVolume, err := s.tryLockByte(volumeByte(id))
		if err == nil {
			return func() { unlockVolume(); unlockPromises() }, nil
		}
		unlockPromises()
		if !errors.Is(err, ErrBusy) {
			return nil, err
		}
		if unlockVolume, err = s.lockNodes(ctx, id); err != nil {
			return nil, err
		}
		unlockVolume()
	}
}

// tryLockToPromise is lockToPromise that answers ErrBusy instead of waiting.
func (s *session) tryLockToPromise(id VolumeID) (unlock func(), err error) {
	unlockPromises, err := s.tryLockByte(promisesByte)
	if err != nil {
		return nil, err
	}
	unlockVolume, err := s.tryLockByte(volumeByte(id))
	if err != nil {
		unlockPromises()
		return nil, err
	}
	return func() { unlockVolume(); unlockPromises() }, nil
}

// lock extends the caller's lock of the volume to all nodes of a shared pool, and looks at
// it again: another node may have removed it since it was found, or made another.
func (v *found) lock(ctx context.Context) (unlock func(), err error) {
	unlock, err = v.session.lockNodes(ctx, v.id)
	if err != nil || !v.session.locksNodes() {
		return unlock, err
	}
	if err := v.lookAgain(); err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// lookAgain is what lock does after it has waited. It answers ErrNotFound for a volume
// that is not there any more.
func (v *found) lookAgain() error {
	e, d, err := v.session.lookup(v.id)
	if err != nil {
		return err
	}
	if v.dir != nil {
		_ = v.dir.Close() // opened for reading
	}
	v.entry, v.dir = e, d
	v.session.pool.note(v.id, e)
	if !e.exists() {
		return fmt.Errorf("volume %s: %w any more", v.id, ErrNotFound)
	}
	return nil
}

// markPublished says that this node is about to publish a volume. The caller has locked
// that on all nodes, as deleting does: either this node has seen the volume gone, or the
// other one sees the mark.
func (s *session) markPublished(id VolumeID) error {
	if !s.pool.config.Shared {
		return nil
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
func (s *session) recoverMarks() error {
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
		if to, is := dir.Temporary(name); is {
			err = s.removeUnwritten(marks, name, to)
		} else if id, parseErr := ParseVolumeID(name); parseErr == nil {
			err = s.recoverMark(id)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// removeUnwritten removes a mark that was being written when a crash came, and is not
// being written now.
func (s *session) removeUnwritten(marks *dir.Dir, name, to string) error {
	remove := func() error {
		if err := marks.Remove(name); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	id, err := ParseVolumeID(to)
	if err != nil {
		return remove() // not a mark's: no call writes it
	}
	return s.unlessBusy(id, remove)
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
