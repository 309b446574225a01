package store

// The order of steps that makes a crash harmless at each of them.
//
// Creating:  Stage (limit, content, sync) → Records.Write → Commit (rename, sync) → answer.
// Removing:  Trash.Remove (rename, sync both; or rename in place, sync; or remove, sync) → Records.Drop → the reaper may erase → answer.
// Growing a directory volume:  Records.Write → limit.
// Growing a block volume:      limit → file → Records.Write → device.
// Moving to another directory: Take (rename, sync both) → KeepRecord there → DropRecord here.
// Fencing, and what comes next: Records.Prepare → Records.Write → Records.Become (rename, sync).
// Sharing blocks of a volume:  Records.Write (family) → limit → Stage of the entry that shares.
//
// Snapshots come and go by the same steps as volumes: the directory of the snapshots is to them
// what the pool's root is to a volume. MakeParent makes it before Stage.
//
// What is in creating/ is a creation that was not answered: Records.Undo, then Throw. What is in
// the trash with the uid of a record is a removal: FinishRemoval.

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Creating is what this node makes, and has not put into its place.
type Creating struct{ store *Store }

// Creating is that of the pool.
func (s *Store) Creating() Creating { return Creating{s} }

// Dir is its directory. OpenWork opens it.
func (c Creating) Dir() *dir.Dir { return c.store.creating }

// Stage makes what is to be a volume aside, where nothing is a volume: makeDir makes its directory in
// creating/, and fill what is in it. Then it is durable.
func (c Creating) Stage(makeDir func(creating *dir.Dir) (*dir.Dir, error), fill func(d *dir.Dir) error) (err error) {
	d, err := makeDir(c.store.creating)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if err := fill(d); err != nil {
		return err
	}
	return d.Sync()
}

// Commit puts what Stage has made into its place, in one step. Before it comes the record, by
// Records.Write. Before that step nothing is a volume; after it everything is there. Errors:
// volume.ErrUnavailable if only making that durable failed.
func (c Creating) Commit(id volume.ID) error {
	to, err := c.store.Parent(id)
	if err != nil {
		return err
	}
	if err := rename(c.store.creating, id.String(), to, id.String()); err != nil {
		return err
	}
	return notDurable(to.Sync())
}

// MakeParent makes the directory of the snapshots, durably, unless it is there.
func (c Creating) MakeParent(id volume.ID) error {
	_, err := c.store.Parent(id)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if _, err := c.store.openSnapshots((*dir.Dir).Ensure); err != nil {
		return err
	}
	return c.store.own.Sync()
}

// SyncParent makes durable what an earlier call may have left at its last step. Errors:
// volume.ErrUnavailable.
func (c Creating) SyncParent(id volume.ID) error {
	in, err := c.store.Parent(id)
	if err != nil {
		return err
	}
	return notDurable(IgnoreReadOnly(in.Sync()))
}

// Undo drops the record of a creation that had not put its directory in place. What is
// in creating/ is the sign that there is something to undo, so that goes after it.
func (r Records) Undo(id volume.ID) error {
	in, err := r.store.Parent(id)
	if err == nil {
		var present bool
		if present, err = in.IsDir(id.String()); present {
			return nil
		}
	}
	if err != nil && !dir.IsMissing(err) {
		return err
	}
	return r.Drop(id)
}

// notDurable is the error of a volume that is in place. It hides the cause from callers that
// test for it: ENOSPC would become RESOURCE_EXHAUSTED, which is final for external-provisioner,
// and another node would make a second volume. After UNAVAILABLE it repeats the call here.
func notDurable(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: the volume is in place, but failed to make that durable: %v", volume.ErrUnavailable, err)
}

// Trashed is the name that a volume gets in the trash. By the record's own name for the volume,
// recovery sees that its removal was begun, and not that the directory was lost. What a
// directory without a record holds was foreign use and stays that until it is erased.
func Trashed(id volume.ID, e Entry) string {
	t := TrashName{Of: id.String(), UID: RandomSuffix(), Promised: e.Promised()}
	if e.Record != nil {
		t.UID = e.Record.UID
	}
	return t.String()
}

// Remove makes the directory of a volume trash, durably and in one step: it moves it into the
// trash, or renames it in place if there is no room. After it comes Records.Drop, and only then may anything
// be erased: a record with neither directory nor trash is a lost volume. It returns the name of the
// piece of trash, which is empty if there was room for nothing, and the volume is gone with its content. Errors: volume.ErrNoSpace.
func (t Trash) Remove(id volume.ID, as string) (piece string, err error) {
	if err := t.store.OpenWork(); err != nil {
		return "", err
	}
	from, err := t.store.Parent(id)
	if err != nil {
		return "", err
	}
	err = rename(from, id.String(), t.store.trash, as)
	switch {
	case err == nil:
		return as, errors.Join(t.store.trash.Sync(), from.Sync())
	case NoRoom(err):
		err := removeInPlace(from, id, as)
		if errors.Is(err, syscall.ENOSPC) {
			atOnce := removeAtOnce(from, id)
			if atOnce == nil {
				return "", from.Sync()
			}
			if !errors.Is(atOnce, syscall.ENOTTY) && !errors.Is(atOnce, syscall.EINVAL) { // it is no subvolume
				err = errors.Join(err, atOnce)
			}
		}
		return inPlace + as, err
	}
	return "", err
}

// FinishRemove does what is left of Remove for a volume that has only its record: its directory became trash of this node, and
// making that durable failed. It returns the piece of trash; empty for a volume whose directory is not there.
func (t Trash) FinishRemove(id volume.ID, e Entry) (piece string, err error) {
	if err := t.store.OpenWork(); err != nil {
		return "", err
	}
	from, err := t.store.Parent(id)
	if err != nil {
		return "", ignoreMissing(err)
	}
	as := Trashed(id, e)
	for _, to := range []struct {
		in          *dir.Dir
		name, piece string
	}{{t.store.trash, as, as}, {from, inPlacePrefix + as, inPlace + as}} {
		if there, err := to.in.IsDir(to.name); err != nil {
			return "", err
		} else if there {
			return to.piece, errors.Join(to.in.Sync(), from.Sync())
		}
	}
	return "", nil
}

// SyncRemoved makes durable that there is nothing of an entry.
func (s *Store) SyncRemoved(id volume.ID) error {
	in, err := s.Parent(id)
	if err == nil {
		err = in.Sync()
	}
	return errors.Join(IgnoreReadOnly(ignoreMissing(err)), IgnoreReadOnly(s.Records().Sync()))
}

func ignoreMissing(err error) error {
	if dir.IsMissing(err) {
		return nil
	}
	return err
}

// Drop removes a record durably. One that is not there is no error.
func (r Records) Drop(id volume.ID) error {
	in, err := r.store.recordsDir()
	if err != nil {
		return err
	}
	dropped, err := r.dropNexts(in, id.String())
	if err != nil {
		return err
	}
	err = r.store.Trash().drop(in, id.String()+recordSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		if !dropped {
			return nil
		}
		err = nil
	}
	return errors.Join(err, in.Sync())
}

// Throw moves what is no volume into the trash. An error for which NoRoom is true says that there is no room for it.
func (t Trash) Throw(from *dir.Dir, name, as string) error {
	return rename(from, name, t.store.trash, as)
}

// rename moves the directory of a volume, whatever flags its user has set on it: a subvolume that is copied has those
// of its source.
func rename(from *dir.Dir, name string, to *dir.Dir, as string) error {
	return unprotected(from, name, func() error { return from.Rename(name, to, as) })
}

// unprotected changes the directory of a volume, and does it again without the flags that kept it from that.
func unprotected(in *dir.Dir, name string, change func() error) error {
	err := change()
	if !dir.IsProtected(err) {
		return err
	}
	changed, flagsErr := dir.Unprotect(in, name)
	switch {
	case flagsErr != nil:
		return flagsErr
	case !changed:
		return err
	}
	return change()
}

// IgnoreReadOnly lets a read-only pool be used: nothing can be removed from it, and a mark
// that stays is removed when it is writable again.
func IgnoreReadOnly(err error) error {
	if errors.Is(err, syscall.EROFS) {
		return nil
	}
	return err
}
