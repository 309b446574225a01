package pool

import (
	"errors"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
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
	v := Volume{ID: id, Pool: p.config.Name, Shared: p.config.Shared, Bytes: space.SizeBytes, Lost: e.lost(), Enforced: enforced(p.keeper(), e)}
	if e.record != nil {
		v.Bytes = e.record.Bytes
	}
	return v
}

// measure is what a volume holds and may hold, and what is to be said of it. Where
// nobody keeps its size that is what the whole pool holds.
func (s *session) measure(d *dir.Dir, e entry, whole dir.Space) (dir.Space, health.Facts) {
	space := whole
	facts := health.Facts{
		Missing:    e.lost(),
		Damaged:    e.damage,
		ReadOnly:   whole.ReadOnly,
		Unenforced: e.record != nil,
	}
	if d != nil && enforced(s.quota, e) {
		facts.Unenforced = false
		usage, err := s.quota.Usage(d, quota.ID(e.record.ProjectID))
		carried, carriedErr := s.carriesID(d, e)
		facts.IO = errors.Join(err, carriedErr)
		facts.LimitDiffers = facts.IO == nil && (!carried || usage.Limit != s.pool.limits(e.record.Bytes))
		space = spaceOf(usage, e.record.Bytes, whole)
	}
	facts.FreeBytes = space.FreeBytes
	facts.InodesCounted = space.Inodes > 0
	facts.FreeInodes = space.InodesFree
	return space, facts
}

// spaceOf is the space of one volume in a pool.
func spaceOf(usage quota.Usage, promised int64, whole dir.Space) dir.Space {
	space := whole
	space.SizeBytes = promised
	space.UsedBytes = usage.Bytes
	space.FreeBytes = max(0, min(promised-usage.Bytes, whole.FreeBytes))
	if usage.Inodes == quota.NotCounted {
		space.Inodes, space.InodesFree = 0, 0
		return space
	}
	if usage.Limit.Inodes > 0 {
		space.Inodes = usage.Limit.Inodes
	}
	space.InodesFree = max(0, min(space.Inodes-usage.Inodes, whole.InodesFree))
	if usage.Limit.Inodes == 0 {
		space.Inodes = usage.Inodes + space.InodesFree
	}
	return space
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
