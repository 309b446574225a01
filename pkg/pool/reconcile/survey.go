package reconcile

import (
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Surveyed is what the last check at a volume saw.
type Surveyed struct {
	ID    volume.ID
	Pool  volume.PoolName
	Bytes int64 // promised, or the size of the pool where nothing was
	// Used bytes and Inodes are what a quota counts, or volume.Unknown. Of a block volume there
	// is neither.
	Used, Inodes int64
	// Unused is what the volume may still take of its promise, in bytes, or volume.Unknown where
	// nothing but the end of the disk stops it.
	Unused int64
	// Condition is the worst of the Conditions, or a remark where there are none.
	Condition  health.Condition
	Conditions []health.Condition
	lost       bool
}

// Ill is a volume that was found abnormal. Lost: its directory was missing, and no call worked on it.
type Ill struct {
	ID   volume.ID
	Lost bool
}

// Compare is by the id.
func (i Ill) Compare(id volume.ID) int { return i.ID.Compare(id) }

// A Survey is what a check at each volume of a pool gave.
type Survey struct {
	Abnormal map[health.Reason]int
	// Unlimited is how many volumes only the end of the disk stops, and Unused what the
	// others may still take of their promises, in bytes.
	Unlimited int
	Unused    int64
	// LostSnapshots is how many snapshots cannot be restored.
	LostSnapshots int
	// Upstream is how many snapshots of the upstream KubeVirt driver there seem to be, or volume.Unknown.
	Upstream int
	// Ill are the volumes that are abnormal, in the order of their ids.
	Ill []Ill
	// Unread has what was logged of the volumes that could not be read.
	Unread  map[volume.ID]string
	Volumes []Surveyed // if they are asked for
}

// Add counts a volume, and leaves it to others whether it is remembered.
func (s *Survey) Add(v Surveyed) {
	if v.Condition.Abnormal {
		s.Abnormal[v.Condition.Reason]++
		s.Ill = append(s.Ill, Ill{v.ID, v.lost})
	}
	if v.Unused == volume.Unknown {
		s.Unlimited++
	} else {
		s.Unused += v.Unused
	}
}

// Survey checks one volume, unless a call is making or removing it.
func (l *Listing) Survey(id volume.ID) (Surveyed, bool) {
	e, d, err := l.In.LookupSettled(id)
	if err != nil {
		c := l.In.Ledger.Known(id)
		return l.surveyed(id, c, l.In.blamed(rememberedFacts(id, c, nil, err))), c.Exists()
	}
	if !e.Exists() {
		return Surveyed{}, false
	}
	if d != nil {
		defer func() { _ = d.Close() }() // opened for reading
	}
	c := InfoOf(e)
	used, facts := l.In.Measure(id, d, e, l.Space)
	facts.InlineUnpublished = l.LeftBehind(id, e)
	v := l.surveyed(id, c, facts)
	if l.In.Enforcer.Enforces(c) && d != nil && !e.Block() {
		v.Used = used.UsedBytes
	}
	if v.Used != volume.Unknown && used.Inodes > 0 {
		v.Inodes = used.InodesUsed
	}
	v.Unused = l.In.unused(id, d, e, used, facts)
	return v, true
}

// unused is what a volume may still take of its promise, or volume.Unknown where nothing but the
// end of the disk stops it as far as is known.
func (p *View) unused(id volume.ID, d *dir.Dir, e store.Entry, used dir.Space, facts health.Facts) int64 {
	switch {
	case d == nil:
		return 0
	case e.Block():
		allocated, err := content.Allocated(id, d)
		if err != nil {
			return e.Promised() // at most
		}
		return max(0, e.Promised()-allocated)
	case !p.Enforcer.Enforces(InfoOf(e)), facts.LimitDiffers, facts.IO != nil, facts.Uncounted != nil:
		return volume.Unknown
	}
	return max(0, e.Promised()-used.UsedBytes)
}

// Health is what is wrong with one volume; nil for nothing. Errors: ErrNotFound, ErrUnavailable.
func (p *View) Health(id volume.ID) ([]health.Condition, error) {
	space, err := p.Store.Space()
	if err != nil {
		return nil, Unavailable(p.Config, err)
	}
	l := &Listing{In: p, Space: space}
	v, ok := l.Survey(id)
	if !ok {
		return nil, fmt.Errorf("%s: %w", id.Named(), volume.ErrNotFound)
	}
	return v.Conditions, nil
}

// Remembered is what is wrong with a volume whose pool does not serve, for the reason that is given.
func (p *View) Remembered(id volume.ID, why error) []health.Condition {
	return rememberedFacts(id, p.Ledger.Known(id), why, nil).Conditions()
}

func (l *Listing) surveyed(id volume.ID, c ledger.Info, facts health.Facts) Surveyed {
	return Surveyed{
		ID: id, Pool: l.In.Config.Name, Bytes: l.In.Volume(id, c, l.Space).Bytes,
		Used: volume.Unknown, Inodes: volume.Unknown, Unused: volume.Unknown, Condition: facts.Condition(), Conditions: facts.Conditions(), lost: facts.Missing,
	}
}
