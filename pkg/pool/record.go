package pool

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
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

// ModeMount is a directory.
const ModeMount Mode = "mount"

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
	// Inline says that the volume lives as long as its publication.
	Inline  bool      `json:"inline,omitempty"`
	Created time.Time `json:"created"`
}

func newRecord(id VolumeID, bytes int64, inline bool) *record {
	return &record{
		Version: recordVersion,
		ID:      id.name,
		UID:     randomSuffix(),
		Mode:    ModeMount,
		Bytes:   bytes,
		Inline:  inline,
		Created: time.Now().UTC().Truncate(time.Second),
	}
}

// randomSuffix is short and never repeats.
func randomSuffix() string { return strings.ToLower(rand.Text()[:16]) }

// decodeRecord checks all that later code relies on. Errors are ErrDamaged.
func decodeRecord(id VolumeID, data []byte) (*record, error) {
	damaged := func(format string, args ...any) (*record, error) {
		return nil, fmt.Errorf("%w of %s: %s", ErrDamaged, id, fmt.Sprintf(format, args...))
	}
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return damaged("%v", err)
	}
	if version.Version != recordVersion {
		return damaged("it has version %d, this driver knows %d", version.Version, recordVersion)
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return damaged("%v", err)
	}
	switch {
	case r.ID != id.name:
		return damaged("it is of volume %q", r.ID)
	case r.Mode != ModeMount:
		return damaged("its mode is %q", r.Mode)
	case r.Bytes < 0:
		return damaged("it promises %d bytes", r.Bytes)
	case !validProject(r):
		return damaged("its project id is %d", r.ProjectID)
	case checkElement("uid", r.UID) != nil || len(r.UID) > 32:
		return damaged("its uid is %q", r.UID)
	}
	return &r, nil
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
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return volumes.WriteFile(r.ID+recordSuffix, append(data, '\n'))
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
func dropRecord(volumes *dir.Dir, id VolumeID) error {
	err := volumes.Remove(id.name + recordSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return errors.Join(err, volumes.Sync())
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
