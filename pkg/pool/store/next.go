package store

import (
	"bytes"
	"errors"
	"io/fs"
	"slices"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Next is what the record of a volume is to become in a step that has to succeed on a filesystem that others have filled. It is written
// beside the record before, when there is room, and then takes its place, which needs no block.
type Next string

// What a fenced volume becomes.
const (
	Unfenced   Next = ".unfenced"
	HandedOver Next = ".handed-over"
)

// nexts are all, in the order in which they go: the last may be the record itself.
var nexts = []Next{HandedOver, Unfenced}

// isNext says whether a file is one.
func isNext(file string) bool {
	return slices.ContainsFunc(nexts, func(next Next) bool { return strings.HasSuffix(file, string(next)) })
}

// Prepare writes what a record is to become, durably. A step that is not taken needs nothing of it. Errors: those of Write.
func (r Records) Prepare(next Next, rec *Record) error {
	in, err := r.store.recordsDir()
	if err != nil {
		return err
	}
	// What is beside may be the record itself, which what it becomes would take the place of: see Become.
	name := rec.ID + recordSuffix
	if there, err := in.Exists(name); err != nil {
		return err
	} else if !there {
		if err := in.Replace(name+string(Unfenced), name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return r.write(rec, next)
}

// Become is Write of what was prepared. Without that, as after a fence of an earlier driver, and where the record has changed since, it is
// written now.
func (r Records) Become(next Next, rec *Record) error {
	in, err := r.store.recordsDir()
	if err != nil {
		return err
	}
	data, err := rec.encode()
	if err != nil {
		return err
	}
	name := rec.ID + recordSuffix
	if prepared, _ := in.ReadFile(name+string(next), maxRecord); !bytes.Equal(prepared, data) {
		return r.Write(rec)
	}
	err = in.Replace(name+string(next), name)
	if next == Unfenced && NoRoom(err) {
		beside, seen := in.Exists(name + string(next))
		if seen != nil || !beside {
			return errors.Join(err, seen) // it was renamed, and this may not last
		}
		// Btrfs whose trees are full renames nothing, but still removes: then what is beside is the record.
		return errors.Join(in.Remove(name), in.Sync())
	}
	if err == nil {
		err = r.forget(in, rec)
	}
	return err
}

// forget removes what a record that is not fenced does not become.
func (r Records) forget(in *dir.Dir, rec *Record) error {
	if rec.Move.Role == MoveSource {
		return nil
	}
	_, err := r.dropNexts(in, rec.ID)
	return err
}

// dropNexts removes what was prepared for a record, and reports whether there was anything.
func (r Records) dropNexts(in *dir.Dir, id string) (dropped bool, err error) {
	for _, next := range nexts {
		name := id + recordSuffix + string(next)
		there, err := in.Exists(name)
		if there {
			err = r.store.Trash().drop(in, name)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return dropped, err
		}
		dropped = dropped || there
	}
	return dropped, nil
}

// bared is the volume whose record lies beside the name of one: see Become.
func bared(in *dir.Dir, file string) (volume.ID, bool) {
	name, ok := strings.CutSuffix(file, string(Unfenced))
	if !ok {
		return volume.ID{}, false
	}
	if covered, err := in.Exists(name); err != nil || covered {
		return volume.ID{}, false
	}
	return recordID(name)
}
