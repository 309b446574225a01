package reconcile

import (
	"errors"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Volume is what is reported of one.
type Volume struct {
	ID   volume.ID
	Pool volume.PoolName
	// Shared: every node of the pool can publish the volume.
	Shared bool
	// MultiNode: the access modes of several nodes are allowed.
	MultiNode bool
	// Mode is how the volume is used.
	Mode volume.Mode
	// Bytes is the size promised, or the size of the pool where nothing was.
	Bytes int64
	// Enforced: the kernel enforces the size, by a limit, or as that of a device.
	Enforced bool
	// Lost: there is a record, but no directory.
	Lost bool
	// Nodes are those that have the volume published.
	Nodes []volume.NodeID
	// Condition is the worst of the Conditions, or a remark where there are none.
	Condition  health.Condition
	Conditions []health.Condition
}

// Volume makes the answer from what is known.
func (p *View) Volume(id volume.ID, c ledger.Info, space dir.Space) Volume {
	v := Volume{ID: id, Pool: p.Config.Name, Mode: c.Mode(), Shared: p.Config.Shared, MultiNode: p.Config.MultiNode(), Bytes: space.SizeBytes, Lost: c.Lost()}
	v.Enforced = c.Is(ledger.IsBlock) || p.enforces(c)
	if c.Is(ledger.HasRecord) {
		v.Bytes = c.Promised
	}
	return v
}

// Measure is what a volume holds and may hold, and what is to be said of it. Where
// its size is not enforced that is what the whole pool holds. The caller holds no lock.
func (p *View) Measure(id volume.ID, d *dir.Dir, e store.Entry, whole dir.Space) (dir.Space, health.Facts) {
	space, c := whole, InfoOf(e)
	facts := health.Facts{
		Volume:     id.String(),
		Missing:    e.Lost(),
		Damaged:    e.Damage,
		ReadOnly:   whole.ReadOnly,
		Unenforced: true,
	}
	facts.FilesystemErrors = max(0, p.Errors)
	switch {
	case e.Record == nil:
		facts.Unpromised = true
	case !p.Enforcer.Enforces(c):
		facts.LimitOff = e.Record.Quota
	case d != nil:
		facts.Unenforced = false
		usage, err := p.Enforcer.Usage(d, c)
		switch {
		case err == nil:
			facts.LimitDiffers, facts.IO = p.limitDiffers(id, d, c, usage)
			if facts.IO == nil {
				facts.Outside, facts.IO = p.Enforcer.Outside(d)
			}
			if p.Strays != nil {
				facts.Strays, facts.Unsearched = p.Strays(id)
			}
		case errors.Is(err, quota.ErrPlain): // as a backup brings it back
			facts.LimitDiffers = true
		default:
			facts.Uncounted = err
		}
		space = spaceOf(usage, e.Record.Bytes, whole)
	}
	facts.FreeBytes, facts.SizeBytes = space.FreeBytes, space.SizeBytes
	facts.InodesCounted = space.Inodes > 0
	facts.FreeInodes = space.InodesFree
	if d != nil {
		space = p.Content(id, e.Record).Measure(d, space, whole, &facts)
	}
	return space, p.blamed(facts)
}

// blamed has the pool answer for what a disk refused that refuses the pool's own files too: then it has failed as a whole, and
// what is in the volume is not known to be lost.
func (p *View) blamed(facts health.Facts) health.Facts {
	if !health.Unreadable(errors.Join(facts.IO, facts.Uncounted)) {
		return facts
	}
	if err := p.Store.ProbeDisk(); err != nil {
		facts.Pool, facts.IO, facts.Uncounted = Unavailable(p.Config, fmt.Errorf("%w: %w", ErrUnreadable, err)), nil, nil
	}
	return facts
}

// ErrUnreadable is the error of a pool whose own files cannot be read.
var ErrUnreadable = errors.New("its disk cannot be read")

// rememberedFacts are those that memory has of a volume that was not read: its pool does not serve,
// or reading it gave an error.
func rememberedFacts(id volume.ID, c ledger.Info, pool, unread error) health.Facts {
	facts := health.Facts{Volume: id.String(), Pool: pool, IO: unread, Missing: c.Lost()}
	if c.Is(ledger.HasDamage) {
		facts.Damaged = volume.ErrDamagedRecord
	}
	return facts
}

// spaceOf is the space of one volume in a pool.
func spaceOf(usage quota.Usage, promised int64, whole dir.Space) dir.Space {
	space := whole
	space.SizeBytes = promised
	space.UsedBytes = usage.Bytes
	space.FreeBytes = max(0, min(promised-usage.Bytes, whole.FreeBytes))
	if usage.Inodes == quota.Unknown {
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

// limitDiffers reports whether the kernel enforces another size than was promised. The
// caller holds no lock, so that both may be changing: what differs is checked again
// while no call works on the volume.
func (p *View) limitDiffers(id volume.ID, d *dir.Dir, c ledger.Info, has quota.Usage) (bool, error) {
	if ok, err := p.Enforcer.Agrees(d, c, has); err != nil || ok {
		return false, err
	}
	unlock, err := p.Lock(id)
	if errors.Is(err, volume.ErrBusy) {
		return false, nil // a call is at work on it
	}
	if err != nil {
		return false, err
	}
	defer unlock()
	rec, err := p.Store.Records().Read(id)
	if err != nil || rec == nil {
		return false, err
	}
	c = InfoOf(store.Entry{Record: rec})
	usage, err := p.Enforcer.Usage(d, c)
	if err != nil {
		return false, err
	}
	ok, err := p.Enforcer.Agrees(d, c, usage)
	return err == nil && !ok, err
}
