package pool

import (
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Volume is what is told of one.
type Volume struct {
	ID   VolumeID
	Pool Name
	// Shared: every node of the pool can publish the volume.
	Shared bool
	// Bytes is the size promised, or the size of the pool where nothing was.
	Bytes int64
	// Enforced: the kernel keeps the size.
	Enforced bool
	// Lost: there is a record, but no directory.
	Lost bool
	// Nodes are those that have the volume published.
	Nodes     []NodeID
	Condition health.Condition
}

// Stats are what a published volume holds.
type Stats struct {
	Space     dir.Space
	Condition health.Condition
}

// volume makes the answer from what is known.
func (p *Pool) volume(id VolumeID, e entry, space dir.Space) Volume {
	v := Volume{ID: id, Pool: p.config.Name, Shared: p.config.Shared, Bytes: space.SizeBytes, Lost: e.lost()}
	if e.record != nil {
		v.Bytes = e.record.Bytes
	}
	return v
}

// facts are those that the pool's own numbers give.
func (p *Pool) facts(e entry, space dir.Space) health.Facts {
	return health.Facts{
		Missing:       e.lost(),
		Damaged:       e.damage,
		ReadOnly:      space.ReadOnly,
		FreeBytes:     space.FreeBytes,
		InodesCounted: space.Inodes > 0,
		FreeInodes:    space.InodesFree,
		Unenforced:    e.record != nil,
	}
}

// usable answers why a volume cannot be worked with; nil if it can.
func (e entry) usable(id VolumeID) error {
	switch {
	case !e.exists():
		return fmt.Errorf("volume %s: %w", id, ErrNotFound)
	case e.damage != nil:
		return fmt.Errorf("volume %s: %w", id, e.damage)
	case e.lost():
		return fmt.Errorf("volume %s: its directory is lost, only its record is left: %w", id, ErrNotFound)
	}
	return nil
}
