package store

import (
	"strconv"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A TrashName is what the name of an entry in the trash says: <volume id>.<uid>+<bytes>. The
// promise goes with the entry by its name, so that a restart and other nodes know how much of
// the pool it may still occupy. An id has no "+".
type TrashName struct {
	// Of is the name that the entry had before; empty for what was no volume.
	Of string
	// UID is that of its record, or random.
	UID string
	// Promised is what it may occupy, in bytes; volume.Unknown for an entry that an earlier
	// version of the driver has thrown, or another program.
	Promised int64
}

// ParseTrashName reads any name, also that of a piece that does not lie in the trash of this node.
func ParseTrashName(name string) TrashName {
	name = name[strings.LastIndexByte(name, '/')+1:]
	t := TrashName{UID: name, Promised: volume.Unknown}
	if at := strings.LastIndexByte(name, '+'); at >= 0 {
		bytes, err := strconv.ParseUint(name[at+1:], 10, 63)
		if err == nil && bytes <= volume.MaxBytes && strconv.FormatUint(bytes, 10) == name[at+1:] {
			t.UID, t.Promised = name[:at], int64(bytes)
		}
	}
	if at := strings.LastIndexByte(t.UID, '.'); at >= 0 {
		t.Of, t.UID = t.UID[:at], t.UID[at+1:]
	}
	return t
}

// String is the name.
func (t TrashName) String() string {
	name := t.UID
	if t.Of != "" {
		name = t.Of + "." + name
	}
	if t.Promised == volume.Unknown {
		return name
	}
	return name + "+" + strconv.FormatInt(t.Promised, 10)
}

// Volume is the volume that the entry was, if it was one.
func (t TrashName) Volume() (volume.ID, bool) {
	id, err := volume.ParseEntry(t.Of)
	return id, err == nil
}

// mostMeasured bounds the files and directories that are counted to measure an entry, so that
// a start and an answer take some ten milliseconds for it, and not minutes.
const mostMeasured = 10_000

// Measured is what an entry occupies of which no name says what it was promised, in bytes;
// volume.Unknown if it cannot be read, or has too many files to count them.
func Measured(in *dir.Dir, name string) int64 {
	left := mostMeasured
	bytes, err := dir.Occupied(in, name, func() error {
		if left--; left < 0 {
			return dir.ErrTooLarge
		}
		return nil
	})
	if err != nil {
		return volume.Unknown
	}
	return bytes
}
