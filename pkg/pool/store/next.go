package store

import (
	"bytes"
	"errors"
	"io/fs"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Next is what the record of a volume is to become in a step that has to succeed on a filesystem that others have filled. It is written
// beside the record before, when there is room, and then takes its place, which needs no block.
type Next string

// What a fenced volume becomes.
const (
	Unfenced   Next = ".unfenced"
	HandedOver Next = ".handed-over"
)

// nexts are all.
var nexts = []Next{Unfenced, HandedOver}

// Prepare writes what a record is to become, durably. A step that is not taken needs nothing of it. Errors: those of Write.
func (r Records) Prepare(next Next, rec *Record) error { return r.write(rec, next) }

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
	if prepared, _ := in.ReadFile(name+string(next), maxRecord); bytes.Equal(prepared, data) {
		err = in.Replace(name+string(next), name)
	} else {
		err = r.Write(rec)
	}
	if err == nil && rec.Move == (Move{}) {
		_ = r.dropNexts(in, rec.ID) // what stays is not used
	}
	return err
}

// dropNexts removes what a record does not become.
func (r Records) dropNexts(in *dir.Dir, id string) error {
	for _, next := range nexts {
		name := id + recordSuffix + string(next)
		if there, err := in.Exists(name); err != nil || !there {
			continue
		}
		if err := r.store.Trash().drop(in, name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
