package pool

import (
	"context"
	"errors"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Source is what a new volume is to be made from.
type Source struct {
	// ID is that of a volume or of a snapshot.
	ID volume.ID
	// Elsewhere: if it is not here it may be on another node, which the caller can choose.
	Elsewhere bool
	// On is the node that has it, as its id says; empty where the id does not say it.
	On string
	// Upstream: it may be a snapshot of the upstream KubeVirt driver.
	Upstream bool
}

// isOf reports whether a record says that its volume was made from the source; of nil, that it
// was made empty.
func (s *Source) isOf(rec *store.Record) bool {
	if s == nil || rec == nil || rec.Origin == nil {
		return s == nil && (rec == nil || rec.Origin == nil)
	}
	return rec.Origin.ID == s.ID.String()
}

// sourceElsewhere returns ErrInvalid for a source that is known to be in another pool. Pools
// may lie on different filesystems, whose files share no blocks.
func sourceElsewhere(holders []*serve.Pool, id volume.ID, chosen *serve.Pool) error {
	for _, p := range holders {
		if p != chosen {
			return fmt.Errorf("%w: its source, %s, is in pool %q, and a volume is made in the pool of its source", volume.ErrInvalid, id.Named(), p.Config.Name)
		}
	}
	return nil
}

// openRequested opens what a volume is to be made from.
func openRequested(ctx context.Context, in *serve.Visit, r Request) (*source, error) {
	if err := in.Discard().NoneLeft(r.ID); err != nil {
		return nil, err
	}
	unlock := func() {}
	if r.Source.ID != r.ID { // or it is not there, and the caller has its lock
		var err error
		if unlock, err = in.Pool.Node.LockToPin(r.Source.ID); err != nil {
			return nil, fmt.Errorf("its source: %w", err)
		}
		if r.Source.Upstream && !in.Pool.Ledger.Known(r.Source.ID).Exists() {
			src, err := sourceUpstream(ctx, in, r.Source.ID, r.Mode, unlock)
			if err != nil {
				return nil, fmt.Errorf("its source: %w", err)
			}
			return src, nil
		}
	}
	src, err := openSource(in, r.Source.ID, CopyWay{WhenWritten: volume.Verify}, unlock)
	if errors.Is(err, volume.ErrNotFound) && r.Source.Elsewhere {
		// The scheduler knows nothing of sources: this makes it try another node.
		where := "not on node " + in.Pool.Options.Node.String()
		if r.Source.On != "" {
			where = "on node " + r.Source.On + ", " + where
		}
		return nil, fmt.Errorf("%w: its source, %s, is %s, and a volume is made where its source is: have its pod run there, by a nodeSelector or the webhook of docs/snapshots.md",
			volume.ErrOtherNode, r.Source.ID.Named(), where)
	}
	if err != nil {
		return nil, fmt.Errorf("its source: %w", limit.NoSpace(err))
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

// room gives the record of a restore what its content may need while it is made: a directory takes
// other blocks in a copy, and a source that was not limited in its inodes may have more than a
// new volume of its size. restore takes back what is left of the bytes. Errors: ErrOutOfRange for a size that
// is less than the source's, or has too few inodes.
func (s *source) room(rec *store.Record, space dir.Space) error {
	if rec.Bytes < s.bytes() {
		return fmt.Errorf("%w: %d bytes, but its source, %s, has %d", volume.ErrOutOfRange, rec.Bytes, s.id.Named(), s.bytes())
	}
	rec.Family = s.family() // which owes more
	enforcer := s.in.Enforcer
	if rec.Mode == volume.ModeBlock || enforcer.Unenforced() != nil {
		return nil //nolint:nilerr // its size is not to be enforced
	}
	used := quota.Usage{Bytes: s.bytes()}
	if c := reconcile.InfoOf(s.entry); enforcer.Enforces(c) {
		var err error
		if used, err = enforcer.Settled(s.dir, c); err != nil {
			return err
		}
	}
	limit := enforcer.Sizes.Limit(reconcile.InfoOf(store.Entry{Record: rec})).Inodes
	bytesPerInode := rec.Bytes / max(1, used.Inodes) >> 10 << 10 // 0 is for no limit
	switch {
	case limit == 0 || used.Inodes <= limit:
	case rec.BytesPerInode != 0 && bytesPerInode > 0:
		rec.BytesPerInode = bytesPerInode
	default:
		return fmt.Errorf("%w: %s has %d files and directories, and a volume of %d bytes has at most %d: ask for a larger one",
			volume.ErrOutOfRange, s.id.Named(), used.Inodes, rec.Bytes, limit)
	}
	rec.Bytes = max(rec.Bytes, inBlocks(copyOf(enforcer, used), space.BlockBytes))
	return nil
}

// fit has a restore promise what was asked for, or what its content holds if that is more, and takes back what only the copier needed.
func (s *source) fit(d *dir.Dir, rec *store.Record, asked volume.Range) error {
	c := reconcile.InfoOf(store.Entry{Record: rec})
	if !s.in.Enforcer.Enforces(c) {
		return nil
	}
	if rec.Bytes == asked.Required && !s.mayExceed() {
		return s.in.Enforcer.Apply(d, c)
	}
	used, err := s.in.Enforcer.Settled(d, c)
	if err != nil {
		return err
	}
	if used.Bytes > rec.Bytes && s.mayExceed() {
		return fmt.Errorf("%w: %s holds %d bytes, some in subvolumes that do not count for it: ask for a larger volume", volume.ErrOutOfRange, s.id.Named(), used.Bytes)
	}
	rec.Bytes = max(asked.Required, used.Bytes)
	if asked.Limit > 0 && rec.Bytes > asked.Limit {
		return fmt.Errorf("%w: the content of %s takes %d bytes in a copy, and the limit is %d", volume.ErrOutOfRange, s.id.Named(), rec.Bytes, asked.Limit)
	}
	return s.in.Enforcer.Apply(d, reconcile.InfoOf(store.Entry{Record: rec}))
}

// restore makes the content of a new volume from the source, and notes in its record how
// consistent it is: a copy of a snapshot as the snapshot. The size that was asked for is the least of the range.
func (s *source) restore(ctx context.Context, rec *store.Record, asked volume.Range) func(*dir.Dir) error {
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
			return s.fit(d, rec, asked)
		}
		return s.in.View().Disk(s.id, rec).Grow(ctx, d, rec.Bytes)
	}
}
