package store

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"math"
	"strings"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// On a full filesystem there may be no room for a directory entry in the trash, and none for the
// trash itself. A volume is then removed in place, and from that moment on is trash that lies where
// the volume was. Removing files needs no block anywhere. There are two ways:
//
// It is renamed in its directory, to a name that no volume has, or into that of the layout. Either needs room for one
// more name: ext4 nearly always has it in the last block of the first, and always in the second, XFS only while the names do
// not fill the inode, and btrfs reserves several leaves for rename(2), which it does not have.
//
// Where that fails, its directory is marked by an extended attribute. That is in the namespace "trusted",
// in which pods write nothing, and needs no block: XFS has room for it in the inode, and takes a
// block of its reserve if not, and btrfs changes one leaf. In an inode of ext4 there is no room
// beside a label of SELinux.
const (
	// aside begins the name of what was renamed in its directory. After it comes the name that it would have in
	// the trash.
	aside = ".trash-"

	// removedMark is set on the directory of the volume. Its value is the name that
	// the volume would have in the trash, without the id, behind sealOf that.
	removedMark = "trusted.hostpath-provisioner.removed"
	// removedInside is set, before the first mark, on the directory that has the volumes: without it
	// they need not be opened to see that none is marked.
	removedInside = "trusted.hostpath-provisioner.removing"

	// publishedLink begins the name of a link to the lock file, in the same directory, by which a node of a shared pool
	// that has no room for a file says that it has a volume published: a name needs no inode. After it come
	// sealOf the node and that. It finds room, and does not, where aside does.
	publishedLink = ".published-"
	// publishedHere begins the attribute of the volume that says the same. After it comes the name of the
	// node. The value is sealOf that.
	publishedHere = "trusted.hostpath-provisioner.published."

	maxMark = 255 // bytes
	// inPlaceByte is locked, in a shared pool, while a mark is set, and while removedInside is removed.
	// It is not that of a volume.
	inPlaceByte = math.MaxInt64 - 1
)

// ErrNoRoom reports a filesystem that is too full for the driver's own directories.
var ErrNoRoom = fmt.Errorf("its filesystem is too full for the driver's own directories: %w", syscall.ENOSPC)

// noRoom reports whether an error says that nothing more fits.
func noRoom(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// inPlace begins the name of a piece of trash that lies where its volume was.
const inPlace = "./"

// removeInPlace makes the directory of a volume trash where it is, durably and in one step.
func (s *Store) removeInPlace(ctx context.Context, in *dir.Dir, id volume.ID, as string) error {
	to := in
	err := rename(in, id.String(), to, aside+as)
	if noRoom(err) && !s.Bare() {
		to = s.own
		err = rename(in, id.String(), to, aside+as)
	}
	switch {
	case err == nil:
		return errors.Join(to.Sync(), in.Sync())
	case noRoom(err):
		return s.markRemoved(ctx, in, id, as)
	}
	return err
}

// markRemoved marks the directory of a volume.
func (s *Store) markRemoved(ctx context.Context, in *dir.Dir, id volume.ID, as string) (err error) {
	done, err := s.lockMarks(ctx)
	if err != nil {
		return err
	}
	defer done()
	// At the end, so that ForgetMarks has either read the mark or sees the number change.
	defer s.at.marked.Add(1)
	if err := errors.Join(in.SetAttribute(removedInside, nil), in.Sync()); err != nil {
		return err
	}
	d, err := in.Open(id.String())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	mark := strings.TrimPrefix(as, id.String()+".")
	seal, err := sealOf(d, id, mark)
	if err != nil {
		return err
	}
	err = unprotected(in, id.String(), func() error { return d.SetAttribute(removedMark, []byte(seal+mark)) })
	return errors.Join(err, d.Sync())
}

// lockMarks keeps others from setting marks, and from removing removedInside. The byte of a shared
// pool holds against calls of this process too.
func (s *Store) lockMarks(ctx context.Context) (unlock func(), err error) {
	if s.at.Shared && !s.Bare() {
		return s.LockByte(ctx, inPlaceByte)
	}
	s.at.marking.Lock()
	return s.at.marking.Unlock, nil
}

// mark is that of a directory, which is then no volume. It counts only on the directory that it was
// set on, and not on a copy of it, nor against a record that belongs to another volume.
func (s *Store) mark(d *dir.Dir, id volume.ID) (mark string, removed bool, err error) {
	value, removed, err := d.Attribute(removedMark, maxMark)
	if errors.Is(err, dir.ErrTooLarge) {
		return "", false, nil // not by this driver
	}
	if err != nil || !removed {
		return "", false, err
	}
	if len(value) < sealBytes {
		return "", false, nil
	}
	mark = string(value[sealBytes:])
	seal, err := sealOf(d, id, mark)
	if err != nil || string(value[:sealBytes]) != seal {
		return "", false, err
	}
	if r, err := s.ReadRecord(id); err == nil && r != nil && r.UID != ParseThrown(mark).UID {
		return "", false, nil
	}
	return mark, true, nil
}

// sealBytes is the length of a seal.
const sealBytes = 11

// sealOf binds what an attribute says to one directory, by its name, its inode and when it was made. Whatever
// copies a directory may copy its attributes too: a clone, a snapshot, rsync or tar.
func sealOf(d *dir.Dir, id volume.ID, says string) (string, error) {
	inode, err := d.ID()
	if err != nil {
		return "", err
	}
	born, err := d.Born()
	if err != nil {
		return "", err
	}
	hash := fnv.New64a()
	_, _ = fmt.Fprintf(hash, "%s %d %d %s", id, inode.Ino, born.UnixNano(), says)
	return base64.RawURLEncoding.EncodeToString(hash.Sum(nil)), nil
}

// markIn is mark for a directory that may have gone.
func (s *Store) markIn(in *dir.Dir, id volume.ID) (value string, removed bool, err error) {
	d, err := in.Open(id.String())
	if dir.IsMissing(err) {
		return "", false, nil
	}
	if err != nil {
		return "", false, err
	}
	defer func() { _ = d.Close() }() // opened for reading
	return s.mark(d, id)
}

// anyMarked reports whether a directory may have marked ones in it.
func anyMarked(in *dir.Dir) (bool, error) {
	_, any, err := in.Attribute(removedInside, maxMark)
	return any, err
}

// RemovedInPlace are the pieces of trash that lie where their volumes were.
func (s *Store) RemovedInPlace() (pieces []string, err error) {
	find := func(in *dir.Dir, expected func(volume.ID) bool) error {
		for entry, err := range in.Entries() {
			if err != nil {
				return err
			}
			if as, is := isAside(entry, expected); is {
				pieces = append(pieces, inPlace+as)
			}
		}
		return nil
	}
	err = s.eachParent(func(in *dir.Dir, snapshots bool) error {
		return find(in, func(id volume.ID) bool { return id.IsSnapshot() == snapshots })
	})
	if err == nil && !s.Bare() {
		err = find(s.own, func(volume.ID) bool { return true })
	}
	if err != nil {
		return nil, err
	}
	err = s.eachMarking(func(in *dir.Dir) error {
		found, err := s.markedIn(in)
		pieces = append(pieces, found...)
		return err
	})
	return pieces, err
}

// isAside reports whether an entry was renamed in its directory, and what name it would have in the trash. It is
// a name just as Remove makes it: whoever else makes one that begins so does not mean trash.
func isAside(entry dir.Entry, expected func(volume.ID) bool) (as string, is bool) {
	as, is = strings.CutPrefix(entry.Name, aside)
	if !is || !entry.IsDir {
		return "", false
	}
	t := ParseThrown(as)
	id, ok := t.Volume()
	return as, ok && expected(id) && t.UID != "" && t.Promised != volume.Unknown && t.String() == as
}

// ForgetMarks ends the search for marks where nothing is marked any more. It reads each volume, and
// so without the lock that a removal waits for; in a shared pool once more with it, when there is nothing left. In a
// shared pool without a layout, where whoever marks has the pool's lock, it is for later.
func (s *Store) ForgetMarks(ctx context.Context) error {
	if s.at.Shared && s.Bare() {
		return nil
	}
	return s.eachMarking(func(in *dir.Dir) error {
		before := s.at.marked.Load()
		if found, err := s.markedIn(in); err != nil || len(found) > 0 {
			return err
		}
		done, err := s.lockMarks(ctx)
		if err != nil {
			return err
		}
		defer done()
		if s.at.Shared { // another node may have set one meanwhile
			if found, err := s.markedIn(in); err != nil || len(found) > 0 {
				return err
			}
		} else if s.at.marked.Load() != before {
			return nil
		}
		return in.RemoveAttribute(removedInside)
	})
}

// eachMarking goes over the directories in which directories may be marked.
func (s *Store) eachMarking(do func(in *dir.Dir) error) error {
	return s.eachParent(func(in *dir.Dir, _ bool) error {
		any, err := anyMarked(in)
		if err != nil || !any {
			return err
		}
		return do(in)
	})
}

// eachParent goes over the directories that have those of volumes, or of snapshots.
func (s *Store) eachParent(do func(in *dir.Dir, snapshots bool) error) error {
	for _, id := range []volume.ID{{}, volume.FirstSnapshot()} {
		in, err := s.Parent(id)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := do(in, id.IsSnapshot()); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) markedIn(in *dir.Dir) (pieces []string, err error) {
	for entry, err := range in.Entries() {
		if err != nil {
			return nil, err
		}
		id, parseErr := volume.ParseEntry(entry.Name)
		if parseErr != nil || !entry.IsDir {
			continue
		}
		mark, removed, err := s.markIn(in, id)
		if err != nil {
			return nil, err
		}
		if removed {
			pieces = append(pieces, inPlace+entry.Name+"."+mark)
		}
	}
	return pieces, nil
}

// Pieces are the names of all that this node has to erase: what is in its trash, and what was
// removed in place. Without a trash of its own, what others left is erased where it is: see EachLeft.
func (s *Store) Pieces(alive func(node, sign string) bool) (pieces []string, err error) {
	if s.trash != nil {
		pieces, err = Names(s.trash)
	} else {
		err = s.eachLeft(alive, func(node string, trash *dir.Dir) error {
			thrown, err := Names(trash)
			for _, name := range thrown {
				pieces = append(pieces, node+"/"+name)
			}
			return err
		})
	}
	if err != nil {
		return nil, err
	}
	here, err := s.RemovedInPlace()
	return append(pieces, here...), err
}

// InPiece opens the directory that a piece of trash lies in. It does nothing where the piece is not
// there any more.
func (s *Store) InPiece(name string, do func(in *dir.Dir, entry string) error) error {
	node, entry, apart := strings.Cut(name, "/")
	switch {
	case !apart && s.trash == nil:
		return fmt.Errorf("%s: %w", name, ErrNoRoom)
	case !apart:
		return do(s.trash, name)
	case node+"/" == inPlace:
		return s.inRemoved(entry, do)
	}
	trash, err := openNested(s.own, trashName, node, (*dir.Dir).Open)
	if dir.IsMissing(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = trash.Close() }()
	return do(trash, entry)
}

// LockPiece keeps the other nodes of a shared pool from erasing a piece of trash that lies where its
// volume was, which all of them see. The byte is not that of the volume, which the call still has that has removed
// it. Errors: volume.ErrBusy.
func (s *Store) LockPiece(name string) (unlock func(), err error) {
	if !strings.HasPrefix(name, inPlace) {
		return func() {}, nil
	}
	unlockPiece, err := s.lockRemoved(name)
	if err != nil || s.Bare() {
		return unlockPiece, err
	}
	unlockByte, err := s.TryLockByte(byteOf(name))
	if err != nil {
		unlockPiece()
		return nil, err
	}
	return func() { unlockByte(); unlockPiece() }, nil
}

// lockRemoved locks the piece itself against a node that does not know yet that the pool has a layout.
func (s *Store) lockRemoved(name string) (unlock func(), err error) {
	unlock = func() {}
	if !s.at.Shared {
		return unlock, nil
	}
	if can, err := s.root.CanLockDir(); err != nil || !can {
		return unlock, err
	}
	err = s.InPiece(name, func(in *dir.Dir, entry string) error {
		piece, err := in.Open(entry)
		if err != nil {
			return err
		}
		defer func() { _ = piece.Close() }()
		unlock, err = piece.TryLockDir()
		if errors.Is(err, dir.ErrLocked) {
			err = fmt.Errorf("%w, by another node", volume.ErrBusy)
		}
		return err
	})
	return unlock, err
}

// inRemoved works on what was removed in place by that name.
func (s *Store) inRemoved(name string, do func(in *dir.Dir, entry string) error) error {
	id, ok := ParseThrown(name).Volume()
	if !ok {
		return nil
	}
	in, err := s.Parent(id)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, in := range []*dir.Dir{in, s.own} {
		if in == nil {
			continue // without a layout
		}
		if renamed, err := in.IsDir(aside + name); err != nil || renamed {
			if err == nil {
				err = do(in, aside+name)
			}
			return err
		}
	}
	mark, removed, err := s.markIn(in, id)
	if err != nil || !removed || id.String()+"."+mark != name {
		return err
	}
	return do(in, id.String())
}

// publishInPlace is Mark without a file. No sign of life belongs to it: it counts until the node takes it back.
func (s *Store) publishInPlace(id volume.ID) error {
	return s.inEntry(id, func(d *dir.Dir) error {
		node := s.at.Node.String()
		seal, err := sealOf(d, id, node)
		if err != nil {
			return err
		}
		if s.Bare() {
			return s.publishBare(d, node, seal)
		}
		err = s.own.Link(lockName, s.own, publishedLink+seal+node)
		switch {
		case err == nil, errors.Is(err, fs.ErrExist):
			return s.own.Sync()
		case noRoom(err):
			return markPublished(d, node, seal)
		}
		return err
	})
}

// publishBare is publishInPlace in a pool without a layout: there is no lock file that a link could be of. If there is no room
// for an attribute, as in a small inode with a label of SELinux, there may be an inode for a file.
func (s *Store) publishBare(d *dir.Dir, node, seal string) error {
	err := markPublished(d, node, seal)
	if !noRoom(err) {
		return err
	}
	return s.namePublished(seal + node)
}

func (s *Store) namePublished(says string) error {
	f, err := s.root.MakeFile(publishedLink + says)
	switch {
	case err == nil:
		err = f.Close()
	case errors.Is(err, fs.ErrExist):
		err = nil
	}
	return errors.Join(err, s.root.Sync())
}

// saying is the directory that has the names which say what is published. Errors: errEquipped.
func (s *Store) saying() (*dir.Dir, error) {
	if !s.Bare() {
		return s.own, nil
	}
	equipped, err := hasLayout(s.root)
	if err == nil && equipped {
		err = errEquipped
	}
	return s.root, err
}

// takeSaid moves what publishBare has made into the layout. Whoever works by that has done it before.
func (s *Store) takeSaid() error {
	for entry, err := range s.root.Entries() {
		if err != nil {
			return err
		}
		if _, _, is := publisher(entry.Name); !is || entry.IsDir {
			continue
		}
		err := s.root.Rename(entry.Name, s.own, entry.Name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrExist) {
			return roomFor(err)
		}
	}
	return nil
}

func markPublished(d *dir.Dir, node, seal string) error {
	return errors.Join(d.SetAttribute(publishedHere+node, []byte(seal)), d.Sync())
}

func (s *Store) unpublishInPlace(id volume.ID) error {
	if !s.at.Shared {
		return nil
	}
	err := s.inEntry(id, func(d *dir.Dir) error {
		node := s.at.Node.String()
		seal, err := sealOf(d, id, node)
		if err != nil {
			return err
		}
		in, err := s.saying()
		if err != nil {
			return err
		}
		said, err := in.Exists(publishedLink + seal + node)
		if err == nil && said {
			err = s.drop(in, publishedLink+seal+node)
		}
		if err != nil {
			return err
		}
		_, found, err := d.Attribute(publishedHere+node, maxMark)
		if err != nil || !found {
			return err
		}
		return d.RemoveAttribute(publishedHere + node)
	})
	if dir.IsMissing(err) {
		return nil
	}
	return err
}

// publishedInPlace are the other nodes that have said so without a file.
func (s *Store) publishedInPlace(id volume.ID) (nodes []volume.NodeID, err error) {
	err = s.inEntry(id, func(d *dir.Dir) error {
		said, err := s.saidInPlace(d)
		if err != nil {
			return err
		}
		for _, name := range said {
			node, seal, ok := publisher(name)
			if !ok || node == s.at.Node {
				continue
			}
			want, err := sealOf(d, id, node.String())
			if err != nil {
				return err
			}
			if seal == want { // and not of one that it is a copy of
				nodes = append(nodes, node)
			}
		}
		return nil
	})
	if dir.IsMissing(err) {
		err = nil
	}
	return nodes, err
}

// saidInPlace are the names that begin with publishedLink among others, those that attributes of a volume stand for included.
func (s *Store) saidInPlace(d *dir.Dir) ([]string, error) {
	in, err := s.saying()
	if err != nil {
		return nil, err
	}
	said, err := Names(in)
	if err != nil {
		return nil, err
	}
	attributes, err := d.Attributes()
	if err != nil {
		return nil, err
	}
	for _, name := range attributes {
		node, is := strings.CutPrefix(name, publishedHere)
		if !is {
			continue
		}
		seal, _, err := d.Attribute(name, maxMark)
		if err != nil {
			return nil, err
		}
		said = append(said, publishedLink+string(seal)+node)
	}
	return said, nil
}

// publisher is the node that a name is of which begins with publishedLink, and its seal.
func publisher(name string) (node volume.NodeID, seal string, ok bool) {
	says, is := strings.CutPrefix(name, publishedLink)
	if !is || len(says) < sealBytes {
		return node, "", false
	}
	node, err := volume.ParseNodeID(says[sealBytes:])
	return node, says[:sealBytes], err == nil
}

func (s *Store) inEntry(id volume.ID, do func(d *dir.Dir) error) error {
	d, err := s.openEntry(id)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return do(d)
}
