package store

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

const (
	recordVersion = 1
	recordSuffix  = ".json"
	// maxRecord bounds what is read of a record, in bytes; one has about 300.
	maxRecord = 64 << 10
	// maxUID bounds a uid, in bytes, so that each name of a volume that was removed in place is one of a file (NAME_MAX, 255 bytes).
	// Those of RandomSuffix have 16.
	maxUID = 255 - len(inPlacePrefix) - volume.MaxID - len(".+9223372036854775807")
)

// A Record is the promise that was given for a volume.
type Record struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
	// UID distinguishes this volume from an earlier one of the same name.
	UID  string      `json:"uid"`
	Mode volume.Mode `json:"mode"`
	// Bytes is the size promised.
	Bytes int64 `json:"bytes"`
	// Quota is who enforces the size, by the name of its kind; empty if nothing does.
	Quota string `json:"quota,omitempty"`
	// ProjectID is the id that the directory is counted by, where ids are given.
	ProjectID uint64 `json:"projectID,omitempty"`
	// BytesPerInode is the size for which the volume has one inode, in bytes, where it was made
	// with the default of its filesystem; 0 for no limit.
	BytesPerInode int64 `json:"bytesPerInode,omitempty"`
	// Thin says that a block volume has no space set aside in the filesystem.
	Thin bool `json:"thin,omitempty"`
	// BlockBytes is the logical block of a block volume's devices: what was written
	// with one may not be readable with another.
	BlockBytes int64 `json:"blockBytes,omitempty"`
	// Inline says that the volume lives as long as its publication.
	Inline bool `json:"inline,omitempty"`
	// Provisional says that the caller that asked for the volume has not saved it yet: after a crash no client may know of it.
	Provisional bool `json:"provisional,omitempty"`
	// Client is what the client that had the volume last knew it by, such as the uid of its PersistentVolume; empty if that is not recorded.
	Client string `json:"client,omitempty"`
	// Origin is what a snapshot is of, or what a volume was made from; nil for a volume that
	// was made empty.
	Origin *volume.Origin `json:"origin,omitempty"`
	// Family is the uid of the entry whose blocks this one shares, its own for the first;
	// empty as long as it shares none.
	Family string `json:"family,omitempty"`
	// Move is that of a volume which moves between nodes.
	Move Move `json:"move,omitzero"`
	// Moved is the id of the move that brought the volume here; empty for one that was made here.
	Moved string `json:"moved,omitempty"`
	// Undone is the id of the move that was undone here last. An earlier driver forgets it.
	Undone  string    `json:"undone,omitempty"`
	Created time.Time `json:"created"`
}

// NewRecord is the record of a volume that is made now. Callers add what else it has.
func NewRecord(id volume.ID, mode volume.Mode, bytes int64) *Record {
	return &Record{
		Version: recordVersion,
		ID:      id.String(),
		UID:     RandomSuffix(),
		Mode:    mode,
		Bytes:   bytes,
		Created: time.Now().UTC().Truncate(time.Second),
	}
}

// IsSnapshot reports whether the record is of a snapshot, and not of a volume.
func (r *Record) IsSnapshot() bool { return strings.HasPrefix(r.ID, volume.FirstSnapshot().String()) }

// RandomSuffix is short and never repeats.
func RandomSuffix() string { return strings.ToLower(rand.Text()[:16]) }

// decodeRecord checks all that later code relies on. Errors: volume.ErrDamagedRecord.
func decodeRecord(id volume.ID, data []byte) (*Record, error) {
	damaged := func(format string, args ...any) (*Record, error) {
		return nil, fmt.Errorf("%w of %s: %s", volume.ErrDamagedRecord, id, fmt.Sprintf(format, args...))
	}
	var r Record
	unfit := json.Unmarshal(data, &r)
	if unfit != nil {
		var err error
		if r.Version, err = versionOf(data); err != nil {
			return damaged("%v", err)
		}
	}
	r.forgetBase()
	switch {
	case r.Version < recordVersion || r.Version > basedVersion:
		return damaged("it has version %d, this driver knows %d to %d", r.Version, recordVersion, basedVersion)
	case unfit != nil:
		return damaged("%v", unfit)
	case r.Version != r.version() || !validMove(r):
		return damaged("its version is %d, and its move %+v", r.Version, r.Move)
	case r.ID != id.String():
		return damaged("it is of volume %q", r.ID)
	case r.Mode != volume.ModeMount && r.Mode != volume.ModeBlock:
		return damaged("its mode is %q", r.Mode)
	case !validBlock(r):
		return damaged("its logical block has %d bytes", r.BlockBytes)
	case r.Bytes < 0 || r.Bytes > volume.MaxBytes:
		return damaged("it promises %d bytes", r.Bytes)
	case r.BytesPerInode < 0 || r.BytesPerInode >= 64<<20 || r.BytesPerInode%1024 != 0:
		return damaged("it has an inode for each %d bytes", r.BytesPerInode)
	case !validProject(r):
		return damaged("its project id is %d", r.ProjectID)
	case !validOrigin(r, id):
		return damaged("its origin is %+v", r.Origin)
	case r.Family != "" && !validName(r.Family):
		return damaged("its family is %q", r.Family)
	case !validName(r.UID) || len(r.UID) > maxUID || strings.Contains(r.UID, "."):
		return damaged("its uid is %q", r.UID)
	}
	return &r, nil
}

// validName reports whether a uid has the characters of an id.
func validName(uid string) bool {
	_, err := volume.ParseID(uid)
	return err == nil
}

// validOrigin reports whether the record says what it is made from, as a snapshot has to.
func validOrigin(r Record, id volume.ID) bool {
	if r.Origin == nil {
		return !id.IsSnapshot()
	}
	_, err := volume.ParseEntry(r.Origin.ID)
	return err == nil && validName(r.Origin.UID) && 0 <= r.Origin.Bytes && r.Origin.Bytes <= volume.MaxBytes &&
		r.Origin.Method.Valid() && r.Origin.Consistency.Valid()
}

// validBlock reports whether the block is one that a device of that mode can have.
func validBlock(r Record) bool {
	switch r.BlockBytes {
	case 512, 1024, 2048, 4096:
		return r.Mode == volume.ModeBlock
	}
	return r.BlockBytes == 0 && r.Mode == volume.ModeMount
}

// validProject reports whether the id is one that the driver gives. Limits of others
// are not changed.
func validProject(r Record) bool {
	id := quota.ID(r.ProjectID)
	switch quota.Kind(r.Quota) {
	case quota.XFS, quota.Ext4:
		return quota.FirstID <= id && id <= quota.LastID
	}
	return id == 0
}

// Records are those of the volumes and snapshots of a pool.
type Records struct{ store *Store }

// Records are those of the pool.
func (s *Store) Records() Records { return Records{s} }

// Write writes a record durably, or leaves the one that is there. One that could not be read is volume.ErrInvalid.
func (r Records) Write(rec *Record) error { return r.write(rec, "") }

func (r Records) write(rec *Record, beside Next) error {
	data, err := rec.encode()
	if err != nil {
		return err
	}
	if err := isReadable(rec.ID, data); err != nil {
		return err
	}
	in, err := r.store.recordsDir()
	if err != nil {
		return err
	}
	err = in.WriteFile(rec.ID+recordSuffix+string(beside), data)
	if err == nil && beside == "" {
		err = r.forget(in, rec)
	}
	return err
}

// Sync makes durable what Write has put in place, also where it failed after that.
func (r Records) Sync() error {
	in, err := r.store.recordsDir()
	if err != nil {
		return err
	}
	return in.Sync()
}

// isReadable returns an error for what decodeRecord would refuse, since it may have come from another node. Nothing is damaged then.
func isReadable(name string, data []byte) error {
	id, err := volume.ParseEntry(name)
	if err == nil {
		_, err = decodeRecord(id, data)
	}
	if err == nil && len(data) > maxRecord {
		err = dir.ErrTooLarge
	}
	if err != nil {
		return fmt.Errorf("%w: no such record can be: %v", volume.ErrInvalid, err)
	}
	return nil
}

// encode is the file as the driver writes it.
func (r *Record) encode() ([]byte, error) {
	versioned := *r
	versioned.Version = r.version()
	data, err := json.Marshal(versioned)
	return append(data, '\n'), err
}

// Read returns nil where there is none. Errors: ErrDamagedRecord, ErrIO.
func (r Records) Read(id volume.ID) (*Record, error) {
	data, err := dir.ReadFileIn(r.store.own, volumesName, id.String()+recordSuffix, maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		data, err = dir.ReadFileIn(r.store.own, volumesName, id.String()+recordSuffix+string(Unfenced), maxRecord)
	}
	if errors.Is(err, fs.ErrNotExist) {
		_, err = r.store.recordsDir() // without it no record is missing
		if err == nil {
			return nil, nil
		}
	}
	if errors.Is(err, dir.ErrNotFile) || errors.Is(err, dir.ErrTooLarge) {
		return nil, fmt.Errorf("%w of %s: %w", volume.ErrDamagedRecord, id, err)
	}
	if err != nil {
		return nil, fmt.Errorf("%w while reading the record of %s: %w", volume.ErrIO, id, err)
	}
	return decodeRecord(id, data)
}

// drop removes a file of the layout. If a directory is in its place, that goes the way
// of all trees.
func (t Trash) drop(from *dir.Dir, name string) error {
	err := from.Remove(name)
	if !errors.Is(err, syscall.EISDIR) {
		return err
	}
	if err := t.store.OpenWork(); err != nil {
		return err
	}
	as := TrashName{UID: RandomSuffix(), Promised: Measured(from, name)}.String()
	if err := t.Throw(from, name, as); err != nil {
		return err
	}
	t.store.at.QueueTrash(as)
	return nil
}

// writtenID is the volume that a file is about which is written among the records.
func writtenID(file string) (volume.ID, bool) {
	for _, next := range nexts {
		file = strings.TrimSuffix(file, string(next))
	}
	return recordID(file)
}

// recordID is the volume that a record among the files is about.
func recordID(file string) (volume.ID, bool) {
	name, ok := strings.CutSuffix(file, recordSuffix)
	if !ok {
		return volume.ID{}, false
	}
	id, err := volume.ParseEntry(name)
	return id, err == nil
}

// Changed is when the record of a volume was last written.
func (r Records) Changed(id volume.ID) (time.Time, error) {
	in, err := r.store.recordsDir()
	if err != nil {
		return time.Time{}, err
	}
	return dir.Changed(in, id.String()+recordSuffix)
}
