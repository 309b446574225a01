package store

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// On a full filesystem there may be no room for one more name in the trash. A volume is then renamed in its own
// directory, whose block or inode often has room, to a name that no volume has. From that moment on it is trash that lies
// where the volume was. Erasing it needs no block.

const (
	// inPlacePrefix begins the name of a volume that was removed in place. After it comes the name that it would have
	// in the trash.
	inPlacePrefix = ".trash-"
	// inPlace begins the name of the same as a piece of trash.
	inPlace = "./"
)

// ErrNoRoom reports a filesystem that is too full for the driver's own directories.
var ErrNoRoom = fmt.Errorf("its filesystem is too full for the driver's own directories; it is served as soon as there is room: %w", syscall.ENOSPC)

// roomFor has a filesystem that takes nothing more report ErrNoRoom.
func roomFor(err error) error {
	if NoRoom(err) && !errors.Is(err, ErrNoRoom) {
		return fmt.Errorf("%w: %w", ErrNoRoom, err)
	}
	return err
}

// NoRoom reports whether an error says that nothing more fits.
func NoRoom(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// removeInPlace makes the directory of a volume trash where it is, durably and in one step. Errors: volume.ErrNoSpace.
func removeInPlace(in *dir.Dir, id volume.ID, as string) error {
	err := rename(in, id.String(), in, inPlacePrefix+as)
	if NoRoom(err) {
		return fmt.Errorf("%w: no room to rename the volume; remove files from the pool's filesystem: %w", volume.ErrNoSpace, err)
	}
	if err != nil {
		return err
	}
	return in.Sync()
}

// removeAtOnce removes a volume that is a subvolume of btrfs with its content. It needs no room: where the metadata of btrfs is
// full, a volume cannot be renamed into the trash, although there is room for data.
// The subvolumes that its users made in it come first.
func removeAtOnce(in *dir.Dir, id volume.ID) error {
	remove := func() error { return dir.RemoveSubvolume(in, id.String()) }
	err := unprotected(in, id.String(), remove)
	if !errors.Is(err, syscall.ENOTEMPTY) {
		return err
	}
	d, err := in.Open(id.String())
	if err != nil {
		return err
	}
	if err := errors.Join(quota.RemoveNested(d), d.Close()); err != nil {
		return err
	}
	return unprotected(in, id.String(), remove)
}

// Trash is what this node has to erase: pieces.
type Trash struct{ store *Store }

// Trash is that of the pool.
func (s *Store) Trash() Trash { return Trash{s} }

// Dir is its directory. OpenWork opens it.
func (t Trash) Dir() *dir.Dir { return t.store.trash }

// InPlace are the pieces of trash that lie where their volumes were.
func (t Trash) InPlace() (pieces []string, err error) {
	for _, snapshots := range []bool{false, true} {
		in := t.store.root
		if snapshots {
			if in, err = t.store.Parent(volume.FirstSnapshot()); errors.Is(err, fs.ErrNotExist) {
				continue
			} else if err != nil {
				return nil, err
			}
		}
		for entry, err := range in.Entries() {
			if err != nil {
				return nil, err
			}
			if as, is := removedInPlace(entry, snapshots); is {
				pieces = append(pieces, inPlace+as)
			}
		}
	}
	return pieces, nil
}

// removedInPlace reports whether an entry was removed in place, and what name it would have in the trash. Only a
// name just as the driver makes it is one.
func removedInPlace(entry dir.Entry, snapshots bool) (as string, is bool) {
	as, is = strings.CutPrefix(entry.Name, inPlacePrefix)
	if !is || !entry.IsDir {
		return "", false
	}
	t := ParseTrashName(as)
	id, ok := t.Volume()
	return as, ok && id.IsSnapshot() == snapshots && t.UID != "" && t.Promised != volume.Unknown && t.String() == as
}

// All are their names: what is in its trash, and what was removed in place.
func (t Trash) All() (pieces []string, err error) {
	if pieces, err = Names(t.store.trash); err != nil {
		return nil, err
	}
	here, err := t.InPlace()
	return append(pieces, here...), err
}

// In opens the directory that a piece of trash lies in. It does nothing where the piece is not
// there any more.
func (t Trash) In(name string, do func(in *dir.Dir, entry string) error) error {
	as, here := strings.CutPrefix(name, inPlace)
	if !here {
		return do(t.store.trash, name)
	}
	id, ok := ParseTrashName(as).Volume()
	if !ok {
		return nil
	}
	in, err := t.store.Parent(id)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if there, err := in.IsDir(inPlacePrefix + as); err != nil || !there {
		return err
	}
	return do(in, inPlacePrefix+as)
}

// Lock keeps the other nodes of a shared pool from erasing a piece of trash that lies where its
// volume was, which all of them see. The byte is not that of the volume, which the call still has that has removed
// it. Errors: volume.ErrBusy.
func (t Trash) Lock(name string) (unlock func(), err error) {
	if !strings.HasPrefix(name, inPlace) {
		return func() {}, nil
	}
	return t.store.Nodes().TryLockByte(byteOf(name))
}
