package snapshot

import (
	"context"
	"errors"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Wanted source is what a new volume is to be made from.
type Wanted struct {
	// ID is that of a volume or of a snapshot.
	ID volume.ID
	// Elsewhere: if it is not here it may be on another node, which the caller can choose.
	Elsewhere bool
	// On is the node that has it, as its id says; empty where the id does not say it.
	On string
	// Upstream: it may be a snapshot of the upstream KubeVirt driver.
	Upstream bool
}

// IsOf reports whether a record says that its volume was made from the source; of nil, that it
// was made empty.
func (s *Wanted) IsOf(rec *store.Record) bool {
	if s == nil || rec == nil || rec.Origin == nil {
		return s == nil && (rec == nil || rec.Origin == nil)
	}
	return rec.Origin.ID == s.ID.String()
}

// Requested opens what a volume of a mode is to be made from, with its lock.
func (p *Pool) Requested(w *Wanted, mode volume.Mode, unlock func()) (*Source, error) {
	src, err := p.Open(w.ID, Way{WhenWritten: volume.Verify}, unlock)
	if errors.Is(err, volume.ErrNotFound) && w.Elsewhere {
		// The scheduler knows nothing of sources: this makes it try another node.
		where := "is not on node " + p.Node.String()
		if w.On != "" {
			where = "is on node " + w.On + ", not on node " + p.Node.String()
		}
		return nil, fmt.Errorf("%w for a copy of %s, which %s", volume.ErrNoSpace, w.ID.Named(), where)
	}
	if err != nil {
		return nil, fmt.Errorf("its source: %w", limit.NoSpace(err))
	}
	if src.entry.Mode() != mode {
		src.Close()
		return nil, fmt.Errorf("%w: its source, %s, has the mode %s, not %s", volume.ErrInvalid, w.ID.Named(), src.entry.Mode(), mode)
	}
	return src, nil
}

// AtLeast is the range of sizes of a copy for which no size was asked: that of the source.
func (s *Source) AtLeast(r volume.Range) volume.Range {
	if r.Required == 0 {
		r.Required = s.bytes()
		if r.Limit > 0 {
			r.Required = min(r.Required, r.Limit)
		}
	}
	return r
}

// Fits returns ErrOutOfRange for a size that is less than the source's.
func (s *Source) Fits(bytes int64) error {
	if bytes < s.bytes() {
		return fmt.Errorf("%w: %d bytes, but its source, %s, has %d", volume.ErrOutOfRange, bytes, s.id.Named(), s.bytes())
	}
	return nil
}

// Restore makes the content of a new volume from the source, and notes in its record how
// consistent it is: a copy of a snapshot as the snapshot.
func (s *Source) Restore(ctx context.Context, rec *store.Record) func(*dir.Dir) error {
	return func(d *dir.Dir) error {
		if err := s.fill(ctx, d, rec.Origin); err != nil {
			return refused(err)
		}
		if rec.Origin.Consistency == volume.Unverified {
			return errUnstill
		}
		if s.id.IsSnapshot() {
			rec.Origin.Consistency, rec.Origin.Cut = s.entry.Record.Origin.Consistency, s.entry.Record.Origin.Cut
		}
		if rec.Mode != volume.ModeBlock {
			return nil
		}
		return s.pool.Disk(s.id, rec).Grow(ctx, d, rec.Bytes)
	}
}
