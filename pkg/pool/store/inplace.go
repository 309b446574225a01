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
// trash itself. A volume is then removed in place: its directory is marked by an extended
// attribute, and from that moment on is trash that lies where the volume was. The attribute is in
// the namespace "trusted", in which pods write nothing, and needs no block: XFS and ext4 have room for it
// in the inode, XFS takes a block of its reserve if not, and btrfs changes one leaf, where rename(2)
// changes several and so finds no room long before. Removing files needs no block anywhere.
const (
	// removedMark is set on the directory of the volume. Its value is sealOf that, and the name that
	// the volume would have in the trash, without the id.
	removedMark = "trusted.hostpath-provisioner.removed"
	// removedInside is set, before the first mark, on the directory that has the volumes: without it
	// they need not be opened to see that none is marked.
	removedInside = "trusted.hostpath-provisioner.removing"

	// publishedHere begins the attribute by which a node of a shared pool that has no room for its
	// mark marks the volume itself. After it comes the name of the node. The value is sealOf the directory.
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

// removeInPlace marks the directory of a volume, durably and in one step.
func (s *Store) removeInPlace(ctx context.Context, id volume.ID, as string) (err error) {
	done, err := s.lockMarks(ctx)
	if err != nil {
		return err
	}
	defer done()
	in, err := s.Parent(id)
	if err != nil {
		return err
	}
	if err := errors.Join(in.SetAttribute(removedInside, nil), in.Sync()); err != nil {
		return err
	}
	d, err := in.Open(id.String())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	seal, err := sealOf(d, id)
	if err != nil {
		return err
	}
	mark := seal + strings.TrimPrefix(as, id.String()+".")
	return errors.Join(d.SetAttribute(removedMark, []byte(mark)), d.Sync())
}

// lockMarks keeps others from setting marks, and from removing removedInside. The byte of a shared
// pool holds against calls of this process too.
func (s *Store) lockMarks(ctx context.Context) (unlock func(), err error) {
	if s.at.Shared {
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
	seal, err := sealOf(d, id)
	if err != nil {
		return "", false, err
	}
	mark, removed = strings.CutPrefix(string(value), seal)
	if !removed {
		return "", false, nil
	}
	if r, err := s.ReadRecord(id); err == nil && r != nil && r.UID != ParseThrown(mark).UID {
		return "", false, nil
	}
	return mark, true, nil
}

// sealOf binds an attribute to one directory by its name, its inode and when it was made. Whatever
// copies a directory may copy its attributes too: a clone, a snapshot, rsync or tar.
func sealOf(d *dir.Dir, id volume.ID) (string, error) {
	inode, err := d.ID()
	if err != nil {
		return "", err
	}
	born, err := d.Born()
	if err != nil {
		return "", err
	}
	hash := fnv.New64a()
	_, _ = fmt.Fprintf(hash, "%s %d %d", id, inode.Ino, born.UnixNano())
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
	err = s.eachMarking(func(in *dir.Dir) error {
		found, err := s.markedIn(in)
		pieces = append(pieces, found...)
		return err
	})
	return pieces, err
}

// ForgetMarks ends the search for marks where nothing is marked any more.
func (s *Store) ForgetMarks(ctx context.Context) error {
	return s.eachMarking(func(in *dir.Dir) error {
		done, err := s.lockMarks(ctx)
		if err != nil {
			return err
		}
		defer done()
		if found, err := s.markedIn(in); err != nil || len(found) > 0 {
			return err
		}
		return in.RemoveAttribute(removedInside)
	})
}

// eachMarking goes over the directories in which directories may be marked.
func (s *Store) eachMarking(do func(in *dir.Dir) error) error {
	for _, id := range []volume.ID{{}, volume.FirstSnapshot()} {
		in, err := s.Parent(id)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		any, err := anyMarked(in)
		if err == nil && any {
			err = do(in)
		}
		if err != nil {
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
// removed in place. Without a trash of its own, what others left is erased where it is.
func (s *Store) Pieces() (pieces []string, err error) {
	if s.trash != nil {
		pieces, err = Names(s.trash)
	} else {
		err = s.eachLeft(s.at.Shared, func(node string, trash *dir.Dir) error {
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
		return s.inMarked(entry, do)
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
// volume was, which all of them see. Errors: volume.ErrBusy.
func (s *Store) LockPiece(name string) (unlock func(), err error) {
	id, ok := ParseThrown(name).Volume()
	if !ok || !strings.HasPrefix(name, inPlace) {
		return func() {}, nil
	}
	return s.TryLockByte(VolumeByte(id))
}

// inMarked works on a directory that has the mark which the name says.
func (s *Store) inMarked(name string, do func(in *dir.Dir, entry string) error) error {
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
	mark, removed, err := s.markIn(in, id)
	if err != nil || !removed || id.String()+"."+mark != name {
		return err
	}
	return do(in, id.String())
}

// publishInPlace is Mark on the volume's own directory. No sign of life belongs to it: it counts until
// the node takes it back.
func (s *Store) publishInPlace(id volume.ID) error {
	return s.inEntry(id, func(d *dir.Dir) error {
		seal, err := sealOf(d, id)
		if err != nil {
			return err
		}
		return errors.Join(d.SetAttribute(publishedHere+s.at.Node.String(), []byte(seal)), d.Sync())
	})
}

func (s *Store) unpublishInPlace(id volume.ID) error {
	if !s.at.Shared {
		return nil
	}
	err := s.inEntry(id, func(d *dir.Dir) error {
		name := publishedHere + s.at.Node.String()
		_, found, err := d.Attribute(name, maxMark)
		if err != nil || !found {
			return err
		}
		return d.RemoveAttribute(name)
	})
	if dir.IsMissing(err) {
		return nil
	}
	return err
}

// publishedInPlace are the other nodes that have marked the volume's own directory.
func (s *Store) publishedInPlace(id volume.ID) (nodes []volume.NodeID, err error) {
	err = s.inEntry(id, func(d *dir.Dir) error {
		names, err := d.Attributes()
		if err != nil {
			return err
		}
		for _, name := range names {
			of, is := strings.CutPrefix(name, publishedHere)
			node, parseErr := volume.ParseNodeID(of)
			if !is || parseErr != nil || node == s.at.Node {
				continue
			}
			set, err := isSealed(d, id, name)
			if err != nil {
				return err
			}
			if set {
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

// isSealed reports whether an attribute was set on this directory, and not copied to it.
func isSealed(d *dir.Dir, id volume.ID, name string) (bool, error) {
	value, _, err := d.Attribute(name, maxMark)
	if err != nil {
		return false, err
	}
	seal, err := sealOf(d, id)
	return string(value) == seal, err
}

func (s *Store) inEntry(id volume.ID, do func(d *dir.Dir) error) error {
	d, err := s.openEntry(id)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return do(d)
}
