package pool

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
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

const (
	recordVersion = 1
	recordSuffix  = ".json"
	// maxRecord bounds what is read of a record, in bytes; one has about 300.
	maxRecord = 64 << 10
)

// A Mode is how a volume is used, for its whole life.
type Mode string

// The modes of volumes.
const (
	ModeMount Mode = "mount" // a directory
	ModeBlock Mode = "block" // a block device
)

// A record is the promise that was given for a volume.
type record struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
	// UID tells this volume from an earlier one of the same name.
	UID  string `json:"uid"`
	Mode Mode   `json:"mode"`
	// Bytes is the size promised.
	Bytes int64 `json:"bytes"`
	// Quota is who keeps the size, by the name of its kind; empty for nobody.
	Quota string `json:"quota,omitempty"`
	// ProjectID is the id that the directory is counted by, where ids are given.
	ProjectID uint64 `json:"projectID,omitempty"`
	// Thin says that a block volume has no space set aside in the filesystem.
	Thin bool `json:"thin,omitempty"`
	// BlockBytes is the logical block of a block volume's devices: what was written
	// with one may not be readable with another.
	BlockBytes int64 `json:"blockBytes,omitempty"`
	// Inline says that the volume lives as long as its publication.
	Inline  bool      `json:"inline,omitempty"`
	Created time.Time `json:"created"`
}

func newRecord(r Request, bytes int64, how loop.Allocation) *record {
	return &record{
		Version: recordVersion,
		ID:      r.ID.name,
		UID:     randomSuffix(),
		Mode:    r.Mode,
		Bytes:   bytes,
		Thin:    r.Mode == ModeBlock && how == loop.Thin,
		Inline:  r.Inline,
		Created: time.Now().UTC().Truncate(time.Second),
	}
}

// allocation is how a block volume's file takes its space.
func (r *record) allocation() loop.Allocation {
	if r.Thin {
		return loop.Thin
	}
	return loop.Thick
}

// randomSuffix is short and never repeats.
func randomSuffix() string { return strings.ToLower(rand.Text()[:16]) }

// decodeRecord checks all that later code relies on. Errors are ErrDamaged.
func decodeRecord(id VolumeID, data []byte) (*record, error) {
	damaged := func(format string, args ...any) (*record, error) {
		return nil, fmt.Errorf("%w of %s: %s", ErrDamaged, id, fmt.Sprintf(format, args...))
	}
	r, ok := parseWritten(data)
	var unfit error
	if !ok {
		unfit = json.Unmarshal(data, &r)
	}
	if unfit != nil {
		var err error
		if r.Version, err = versionOf(data); err != nil {
			return damaged("%v", err)
		}
	}
	switch {
	case r.Version != recordVersion:
		return damaged("it has version %d, this driver knows %d", r.Version, recordVersion)
	case unfit != nil:
		return damaged("%v", unfit)
	case r.ID != id.name:
		return damaged("it is of volume %q", r.ID)
	case r.Mode != ModeMount && r.Mode != ModeBlock:
		return damaged("its mode is %q", r.Mode)
	case !validBlock(r):
		return damaged("its logical block has %d bytes", r.BlockBytes)
	case r.Bytes < 0 || r.Bytes > MaxBytes:
		return damaged("it promises %d bytes", r.Bytes)
	case !validProject(r):
		return damaged("its project id is %d", r.ProjectID)
	case checkElement("uid", r.UID) != nil || len(r.UID) > 32 || strings.Contains(r.UID, "."):
		return damaged("its uid is %q", r.UID)
	}
	return &r, nil
}

// validBlock tells whether the block is one that a device of that mode can have.
func validBlock(r record) bool {
	switch r.BlockBytes {
	case 512, 1024, 2048, 4096:
		return r.Mode == ModeBlock
	}
	return r.BlockBytes == 0 && r.Mode == ModeMount
}

// validProject tells whether the id is one that the driver gives. Limits of others
// are left alone.
func validProject(r record) bool {
	id := quota.ID(r.ProjectID)
	switch quota.Kind(r.Quota) {
	case quota.XFS, quota.Ext4:
		return quota.FirstID <= id && id <= quota.LastID
	}
	return id == 0
}

func writeRecord(volumes *dir.Dir, r *record) error {
	data, err := r.encode()
	if err != nil {
		return err
	}
	return volumes.WriteFile(r.ID+recordSuffix, data)
}

// encode is the file as the driver writes it.
func (r *record) encode() ([]byte, error) {
	data, err := json.Marshal(r)
	return append(data, '\n'), err
}

// readRecord answers nil where there is none.
func readRecord(volumes *dir.Dir, id VolumeID) (*record, error) {
	data, err := volumes.ReadFile(id.name+recordSuffix, maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w of %s: %w", ErrDamaged, id, err)
	}
	return decodeRecord(id, data)
}

// dropRecord removes a record durably. One that is not there is no error.
func (s *session) dropRecord(id VolumeID) error {
	err := s.drop(s.volumes, id.name+recordSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return errors.Join(err, s.volumes.Sync())
}

// drop removes a file of the layout. If a directory is in its place, that goes the way
// of all trees.
func (s *session) drop(from *dir.Dir, name string) error {
	err := from.Remove(name)
	if !errors.Is(err, syscall.EISDIR) {
		return err
	}
	if err := s.work(); err != nil {
		return err
	}
	return s.throwAway(from, name, randomSuffix(), unknownBytes)
}

// recordID is the volume that a file among the records is about.
func recordID(file string) (VolumeID, bool) {
	name, ok := strings.CutSuffix(file, recordSuffix)
	if !ok {
		return VolumeID{}, false
	}
	id, err := ParseVolumeID(name)
	return id, err == nil
}
