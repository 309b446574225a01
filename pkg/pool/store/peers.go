package store

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"path"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// PromisesByte is the byte that keeps others from promising anything. The nodes of a shared pool lock
// bytes of one empty file. The first is for promises. Each volume has another, so that what takes long, such as
// allocating a disk, delays no call on another volume. Of two volumes with the same byte one may wait for
// the other, and no more.
const PromisesByte = 0

// VolumeByte is the byte of a volume.
func VolumeByte(id volume.ID) int64 { return byteOf(id.String()) }

func byteOf(name string) int64 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, name) // never fails
	return 1 + int64(h.Sum64()>>2)
}

// Nodes is what the nodes that serve a pool leave for each other: locks, marks of what is published, signs of life, and which driver
// serves it.
type Nodes struct{ store *Store }

// Nodes are those of the pool.
func (s *Store) Nodes() Nodes { return Nodes{s} }

// LockByte waits for a byte of the lock file of a shared pool until ctx ends.
func (n Nodes) LockByte(ctx context.Context, at int64) (unlock func(), err error) {
	if !n.store.at.Shared || n.store.at.ReadOnly {
		return func() {}, nil
	}
	unlock, err = dir.LockByte(ctx, n.store.own, lockName, at)
	if errors.Is(err, syscall.EROFS) {
		return func() {}, nil // nothing can be changed
	}
	return unlock, err
}

// TryLockByte is LockByte that returns ErrBusy instead of waiting.
func (n Nodes) TryLockByte(at int64) (unlock func(), err error) {
	return n.tryByte(dir.TryLockByte, at)
}

// TryShareByte is TryLockByte for a check, with which checks of other nodes may have the byte too.
func (n Nodes) TryShareByte(at int64) (unlock func(), err error) {
	return n.tryByte(dir.TryShareByte, at)
}

func (n Nodes) tryByte(take func(d *dir.Dir, name string, at int64) (func(), error), at int64) (unlock func(), err error) {
	if !n.store.at.Shared || n.store.at.ReadOnly {
		return func() {}, nil
	}
	unlock, err = take(n.store.own, lockName, at)
	switch {
	case errors.Is(err, syscall.EROFS):
		return func() {}, nil
	case errors.Is(err, dir.ErrLocked):
		return nil, fmt.Errorf("%w, by another node", volume.ErrBusy)
	}
	return unlock, err
}

// Mark says that this node is about to publish a volume, durably. The caller has locked that on
// all nodes, as deleting does: either this node has seen the volume gone, or the other one sees
// the mark. On a read-only filesystem one that is there already will do. Errors: volume.ErrNoSpace, EROFS.
func (n Nodes) Mark(id volume.ID) error {
	if !n.store.at.Shared {
		return nil
	}
	err := n.writeMark(id)
	if NoRoom(err) {
		return fmt.Errorf("%w: no room for the mark that keeps other nodes from deleting the volume: %w", volume.ErrNoSpace, err)
	}
	if errors.Is(err, syscall.EROFS) {
		if marked, markedErr := n.IsMarked(id); markedErr == nil && marked {
			return nil
		}
	}
	return err
}

func (n Nodes) writeMark(id volume.ID) error {
	marks, err := n.ensureMarks()
	if err != nil {
		return err
	}
	defer func() { _ = marks.Close() }()
	return marks.WriteFile(id.String(), nil)
}

// ensureMarks opens those of this node, and makes the directory for them, durably.
func (n Nodes) ensureMarks() (*dir.Dir, error) {
	marks, err := n.marks()
	if err != nil || marks != nil {
		return marks, err
	}
	all, err := n.store.own.Ensure(publishedName)
	if err != nil {
		return nil, err
	}
	defer func() { _ = all.Close() }()
	marks, err = all.Ensure(n.store.at.Node.String())
	if err != nil {
		return nil, err
	}
	if err := errors.Join(all.Sync(), n.store.own.Sync()); err != nil {
		_ = marks.Close()
		return nil, err
	}
	return marks, nil
}

// Marked are the volumes of which this node has said that it publishes them.
func (n Nodes) Marked() (map[string]bool, error) {
	marks, err := n.marks()
	if err != nil || marks == nil {
		return nil, err
	}
	defer func() { _ = marks.Close() }()
	names, err := Names(marks)
	marked := make(map[string]bool, len(names))
	for _, name := range names {
		marked[name] = true
	}
	return marked, err
}

// IsMarked reports whether this node has said that it publishes a volume.
func (n Nodes) IsMarked(id volume.ID) (bool, error) {
	marks, err := n.marks()
	if err != nil || marks == nil {
		return false, err
	}
	defer func() { _ = marks.Close() }()
	return marks.Exists(id.String())
}

// Unmark removes the mark of this node.
func (n Nodes) Unmark(id volume.ID) error {
	marks, err := n.marks()
	if err != nil || marks == nil {
		return err
	}
	defer func() { _ = marks.Close() }()
	err = n.store.Trash().drop(marks, id.String())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return IgnoreReadOnly(err)
}

// marks opens those of this node; nil if there are none.
func (n Nodes) marks() (*dir.Dir, error) {
	marks, err := openNested(n.store.own, publishedName, n.store.at.Node.String(), (*dir.Dir).Open)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return marks, err
}

// RecoverMarks goes over the marks of this node, with their paths. One that was being written is handed to
// unwritten, with what removes it, and the volume of each other to marked.
func (n Nodes) RecoverMarks(unwritten func(at string, of volume.ID, remove func() error), marked func(at string, of volume.ID)) error {
	marks, err := n.marks()
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
			unwritten(path.Join(marks.String(), name), id, func() error {
				if err := marks.Remove(name); !errors.Is(err, fs.ErrNotExist) {
					return err
				}
				return nil
			})
		} else if id, err := volume.ParseID(name); err == nil {
			marked(path.Join(marks.String(), name), id)
		}
	}
	return nil
}

// PublishedElsewhere is what other nodes have published, by volume.
func (n Nodes) PublishedElsewhere() (map[string][]volume.NodeID, error) {
	published := make(map[string][]volume.NodeID)
	err := n.eachPeer(func(node volume.NodeID, marks *dir.Dir) error {
		marked, err := Names(marks)
		for _, id := range marked {
			published[id] = append(published[id], node)
		}
		return err
	})
	return published, err
}

// UnpublishedElsewhere returns volume.ErrInUse for a volume that another node has published, however long that gave no sign of
// life: pods run on without the driver.
func (n Nodes) UnpublishedElsewhere(id volume.ID) error {
	return n.eachPeer(func(node volume.NodeID, marks *dir.Dir) error {
		marked, err := marks.Exists(id.String())
		if marked {
			err = fmt.Errorf("%w, %s", volume.ErrInUse, publishedOn(node, marks))
		}
		return err
	})
}

func publishedOn(node volume.NodeID, marks *dir.Dir) string {
	return fmt.Sprintf("published on node %s; if that node does not come back, make sure that it is off, and then: rm -r '%s'", node, marks)
}

// eachPeer goes over the marks of the other nodes.
func (n Nodes) eachPeer(do func(node volume.NodeID, marks *dir.Dir) error) error {
	return n.EachIn(publishedName, func(name string, marks *dir.Dir) error {
		node, err := volume.ParseNodeID(name)
		if err != nil || node == n.store.at.Node {
			return nil //nolint:nilerr // not a node's
		}
		return do(node, marks)
	})
}

// sign is the sign of life of a node: when its directory for trash was changed last, by whatever clock.
// Errors: fs.ErrNotExist for a node that never showed any.
func (n Nodes) sign(node string) (string, error) {
	d, err := openNested(n.store.own, trashName, node, (*dir.Dir).Open)
	if err != nil {
		return "", err
	}
	defer func() { _ = d.Close() }() // opened for reading
	changed, err := dir.Modified(d)
	return fmt.Sprint(changed.UnixNano()), err
}

// ShowAlive shows the other nodes of a shared pool that this one is alive.
func (n Nodes) ShowAlive() error {
	trash, err := n.store.own.Open(trashName)
	if err != nil {
		return err
	}
	defer func() { _ = trash.Close() }()
	return dir.Touch(trash, n.store.at.Node.String())
}

// EachSign reads the signs of life of the other nodes of a shared pool.
func (n Nodes) EachSign(see func(node, sign string)) error {
	return n.EachIn(InTrash, func(node string, _ *dir.Dir) error {
		if node == n.store.at.Node.String() {
			return nil
		}
		sign, err := n.sign(node)
		if err == nil {
			see(node, sign)
		}
		return err
	})
}

// EachLeft goes over what other nodes left, with creating/ and trash/ of each; alive, unless it is nil, says of which
// nodes it is still their own.
func (n Nodes) EachLeft(alive func(node, sign string) bool, do func(node string, creating, trash *dir.Dir) error) error {
	trash, err := n.store.own.Open(trashName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = trash.Close() }()
	var problems []error
	for entry, err := range trash.Entries() {
		if err != nil {
			return err
		}
		if entry.IsDir && entry.Name != n.store.at.Node.String() {
			problems = append(problems, n.left(trash, entry.Name, alive, do))
		}
	}
	return errors.Join(problems...)
}

func (n Nodes) left(trash *dir.Dir, node string, alive func(node, sign string) bool, do func(node string, creating, trash *dir.Dir) error) error {
	if alive != nil {
		if sign, err := n.sign(node); err != nil || alive(node, sign) {
			return err
		}
	}
	left, err := trash.Open(node)
	if err != nil {
		return err
	}
	defer func() { _ = left.Close() }()
	creating, err := openNested(n.store.own, creatingName, node, (*dir.Dir).Ensure)
	if err != nil {
		return err
	}
	defer func() { _ = creating.Close() }()
	return do(node, creating, left)
}
