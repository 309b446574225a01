package pool

import (
	"context"
	"errors"
	"fmt"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Source is what a new volume is to be made from.
type Source struct {
	// ID is that of a volume or of a snapshot.
	ID volume.ID
	// Elsewhere: if it is not here it may be on another node, which the caller can choose.
	Elsewhere bool
}

// isOf reports whether a record says that its volume was made from the source; of nil, that it
// was made empty.
func (s *Source) isOf(rec *store.Record) bool {
	if s == nil || rec == nil || rec.Origin == nil {
		return s == nil && (rec == nil || rec.Origin == nil)
	}
	return rec.Origin.ID == s.ID.String()
}

// sourceElsewhere answers ErrInvalid for a source that is known to be in another pool. Pools
// may lie on different filesystems, whose files share no blocks.
func (s *Set) sourceElsewhere(id volume.ID, chosen *Pool) error {
	for _, p := range s.holders(id) {
		if p != chosen {
			return fmt.Errorf("%w: its source, %s, is in pool %q, and a volume is made in the pool of its source", volume.ErrInvalid, id.Named(), p.config.Name)
		}
	}
	return nil
}

// openRequested opens what a volume is to be made from.
func (v *visit) openRequested(r Request) (*source, error) {
	src, err := v.openSource(r.Source.ID)
	if errors.Is(err, volume.ErrNotFound) && r.Source.Elsewhere {
		// The scheduler knows nothing of sources: this makes it try another node.
		return nil, fmt.Errorf("%w for a copy of %s, which is not on node %s", volume.ErrNoSpace, r.Source.ID.Named(), v.pool.options.Node)
	}
	if err != nil {
		return nil, fmt.Errorf("its source: %w", err)
	}
	if src.entry.Mode() != r.Mode {
		src.close()
		return nil, fmt.Errorf("%w: its source, %s, has the mode %s, not %s", volume.ErrInvalid, r.Source.ID.Named(), src.entry.Mode(), r.Mode)
	}
	return src, nil
}

// atLeast is the range of sizes of a copy for which no size was asked: that of the source.
func (s *source) atLeast(r volume.Range) volume.Range {
	if r.Required == 0 {
		r.Required = s.bytes()
		if r.Limit > 0 {
			r.Required = min(r.Required, r.Limit)
		}
	}
	return r
}

// fits answers ErrOutOfRange for a size that is less than the source's.
func (s *source) fits(bytes int64) error {
	if bytes < s.bytes() {
		return fmt.Errorf("%w: %d bytes, but its source, %s, has %d", volume.ErrOutOfRange, bytes, s.id.Named(), s.bytes())
	}
	return nil
}

// restore makes the content of a new volume from the source, and notes in its record how
// consistent it is: a copy of a snapshot as the snapshot.
func (s *source) restore(ctx context.Context, rec *store.Record) func(*dir.Dir) error {
	return func(d *dir.Dir) error {
		consistency, err := s.fill(ctx, d, false)
		if err != nil {
			return err
		}
		if consistency == volume.Unverified {
			return errUnstill
		}
		rec.Origin.Consistency, rec.Origin.Cut = consistency, time.Now().UTC()
		if s.id.IsSnapshot() {
			rec.Origin.Consistency, rec.Origin.Cut = s.entry.Record.Origin.Consistency, s.entry.Record.Origin.Cut
		}
		if rec.Mode != volume.ModeBlock {
			return nil
		}
		return s.visit.scan().Disk(s.id, rec).Grow(ctx, d, rec.Bytes)
	}
}
