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
	// Mode is how the volume is used.
	Mode Mode
	// Bytes is the size promised, or the size of the pool where nothing was.
	Bytes int64
	// Enforced: the kernel keeps the size, by a limit, or as that of a device.
	Enforced bool
	// Lost: there is a record, but no directory.
	Lost bool
	// Nodes are those that have the volume published.
	Nodes     []NodeID
	Condition health.Condition
}

// Stats are what a published volume holds.
type Stats struct {
	Mode Mode
	// Space is what is in use and free; of a block volume only the size is known.
	Space     dir.Space
	Condition health.Condition
}

// volume makes the answer from what is known.
func (p *Pool) volume(id VolumeID, c card, space dir.Space) Volume {
	v := Volume{ID: id, Pool: p.config.Name, Mode: c.mode(), Shared: p.config.Shared, Bytes: space.SizeBytes, Lost: c.lost()}
	v.Enforced = c.is(isBlock) || p.enforced(c)
	if c.is(hasRecord) {
		v.Bytes = c.promised
	}
	return v
}

// measure is what a volume holds and may hold, and what is to be said of it. Where
// nobody keeps its size that is what the whole pool holds. The caller holds no lock.
func (s *session) measure(id VolumeID, d *dir.Dir, e entry, whole dir.Space) (dir.Space, health.Facts) {
	space, c := whole, e.card()
	facts := health.Facts{
		Missing:    e.lost(),
		Damaged:    e.damage,
		ReadOnly:   whole.ReadOnly,
		Unenforced: true,
	}
	facts.FilesystemErrors = max(0, s.pool.state.Load().errors)
	switch {
	case e.record == nil:
		facts.Unpromised = true
	case !s.enforced(c):
		facts.LimitOff = e.record.Quota
	case d != nil:
		facts.Unenforced = false
		usage, err := s.quota.Usage(d, c.quotaID())
		switch {
		case err == nil:
			facts.LimitDiffers, facts.IO = s.limitDiffers(id, d, c, usage.Limit)
		case errors.Is(err, quota.ErrPlain): // as a backup brings it back
			facts.LimitDiffers = true
		default:
			facts.IO = err
		}
		space = spaceOf(usage, e.record.Bytes, whole)
	}
	facts.FreeBytes, facts.SizeBytes = space.FreeBytes, space.SizeBytes
	facts.InodesCounted = space.Inodes > 0
	facts.FreeInodes = space.InodesFree
	if d != nil && e.block() {
		lookAtDisk(id, d, e, whole, &facts)
		space = dir.Space{SizeBytes: e.record.Bytes}
	}
	return space, facts
}

// facts are those that memory has of a volume that was not read: its pool does not serve,
// or reading it gave an error.
func (c card) facts(pool, unread error) health.Facts {
	facts := health.Facts{Pool: pool, IO: unread, Missing: c.lost()}
	if c.is(hasDamage) {
		facts.Damaged = ErrDamaged
	}
	return facts
}

// spaceOf is the space of one volume in a pool.
func spaceOf(usage quota.Usage, promised int64, whole dir.Space) dir.Space {
	space := whole
	space.SizeBytes = promised
	space.UsedBytes = usage.Bytes
	space.FreeBytes = max(0, min(promised-usage.Bytes, whole.FreeBytes))
	if usage.Inodes == quota.NotCounted {
		space.Inodes, space.InodesFree, space.InodesUsed = 0, 0, 0
		return space
	}
	space.InodesUsed = usage.Inodes
	if usage.Limit.Inodes > 0 {
		space.Inodes = usage.Limit.Inodes
	}
	space.InodesFree = max(0, min(space.Inodes-usage.Inodes, whole.InodesFree))
	if usage.Limit.Inodes == 0 {
		space.Inodes = usage.Inodes + space.InodesFree
	}
	return space
}

// usedAs answers ErrInvalid for another mode than that of the volume.
func (e entry) usedAs(mode Mode) error {
	if mode != e.mode() {
		return fmt.Errorf("%w: it is used as %s, and has the mode %s for life", ErrInvalid, mode, e.mode())
	}
	return nil
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
