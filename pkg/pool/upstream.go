package pool

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/upstream"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// FindUpstream reports on a snapshot of the upstream KubeVirt driver. Errors: ErrNotFound,
// ErrUnavailable, and ErrDamagedRecord or ErrPrecondition for what is none, or none that is whole.
func (s Snapshots) FindUpstream(ctx context.Context, id volume.ID) (Snapshot, error) {
	var found Snapshot
	err := s.anyUpstream(ctx, id, func(p *serve.Pool, in *dir.Dir) error {
		is, err := upstream.Read(in, id)
		if err == nil {
			found = Snapshot{ID: id, Pool: p.Config.Name, Mode: volume.ModeMount, Origin: is.Origin(), Upstream: true}
		}
		return err
	})
	return found, err
}

// DeleteUpstream removes a snapshot of the upstream KubeVirt driver where it lies, with its
// content. Once it has begun it goes on when ctx ends, and the caller, who holds the lock of its
// id, keeps that until it returns. Errors: ErrNotFound, ErrBusy while a volume is made from it,
// ErrUnavailable, ErrPrecondition for a directory that is no such snapshot.
func (s Snapshots) DeleteUpstream(ctx context.Context, id volume.ID) error {
	if err := s.set.node.Pins.Free(id); err != nil {
		return err
	}
	ctx, end := s.set.node.UntilClose(ctx)
	defer end()
	slowly := &reconcile.Pace{Done: new(atomic.Uint64)}
	return s.anyUpstream(ctx, id, func(p *serve.Pool, in *dir.Dir) error {
		err := trace.Step(ctx, "remove the upstream snapshot", func() error { return upstream.Remove(ctx, in, id, slowly.Step) })
		if errors.Is(err, syscall.EROFS) {
			return p.Unavailable(err)
		}
		return err
	})
}

// anyUpstream searches the snapshotPath of each pool for a snapshot. It returns ErrNotFound only
// if every one of them could be asked.
func (s Snapshots) anyUpstream(ctx context.Context, id volume.ID, do func(p *serve.Pool, in *dir.Dir) error) error {
	var problems []error
	done := false
	for _, p := range s.set.node.Pools {
		err := withUpstream(ctx, p, func(in *dir.Dir) error { return do(p, in) })
		switch {
		case err == nil:
			done = true
		case !errors.Is(err, volume.ErrNotFound):
			problems = append(problems, err)
		}
	}
	switch {
	case done:
		return nil
	case len(problems) > 0:
		return fmt.Errorf("%s: %w", id.Named(), errors.Join(problems...))
	}
	return fmt.Errorf("%s: %w", id.Named(), volume.ErrNotFound)
}

// withUpstream opens the pool's snapshotPath; ErrNotFound if there is none.
func withUpstream(ctx context.Context, p *serve.Pool, do func(in *dir.Dir) error) error {
	if p.Config.SnapshotPath == "" {
		return volume.ErrNotFound
	}
	v, err := p.Enter(ctx)
	if err != nil {
		return err
	}
	defer v.Close()
	in, err := openUpstream(ctx, v)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }() // opened for reading
	return do(in)
}

// openUpstream opens the pool's snapshotPath; ErrNotFound if there is none. Outside of the pool it
// may be on a filesystem that hangs.
func openUpstream(ctx context.Context, v *serve.Visit) (in *dir.Dir, err error) {
	c := &v.Pool.Config
	if _, inside := upstream.Below(c); inside {
		in, err = upstream.In(v.Store.Root(), c)
	} else {
		in, err = hang.Run(ctx, v.Pool.Options.HangAfter, func() (*dir.Dir, error) { return upstream.In(nil, c) }, closeLate)
	}
	switch {
	case errors.Is(err, hang.ErrTimeout):
		return nil, fmt.Errorf("%w: the snapshotPath of pool %q: %w", volume.ErrUnavailable, c.Name, err)
	case err == nil && in == nil:
		return nil, volume.ErrNotFound
	}
	return in, err
}

func closeLate(d *dir.Dir, _ error) {
	if d != nil {
		_ = d.Close() // opened for reading
	}
}

// upstreamSnapshots are the ids of what may be snapshots in the pool's snapshotPath, as far as that
// can be read.
func upstreamSnapshots(ctx context.Context, p *serve.Pool) (all []volume.ID) {
	err := withUpstream(ctx, p, func(in *dir.Dir) (err error) {
		all, err = upstream.List(in)
		return err
	})
	// Why it is unavailable is logged when that begins, or an answer to who asks for one of them.
	if err != nil && !errors.Is(err, volume.ErrNotFound) && !errors.Is(err, volume.ErrUnavailable) {
		p.Log.Error(err, "Failed to list the snapshots of the upstream driver")
	}
	return all
}

// sourceUpstream opens a snapshot of the upstream KubeVirt driver to make a volume from it. It takes
// over the lock of its id.
func sourceUpstream(ctx context.Context, in *serve.Visit, id volume.ID, mode volume.Mode, unlock func()) (*source, error) {
	is, data, err := dataUpstream(ctx, in, id)
	if err == nil && mode != volume.ModeMount {
		err = fmt.Errorf("%w: %s is of the upstream KubeVirt driver, which had no volumes of mode %s", volume.ErrInvalid, id.Named(), mode)
		_ = data.Close() // opened for reading
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return foreignSource(in, id, is.Origin(), data, unlock)
}

func dataUpstream(ctx context.Context, in *serve.Visit, id volume.ID) (upstream.Snapshot, *dir.Dir, error) {
	all, err := openUpstream(ctx, in)
	if err != nil {
		return upstream.Snapshot{}, nil, fmt.Errorf("%s: %w", id.Named(), err)
	}
	defer func() { _ = all.Close() }() // opened for reading
	return upstream.Open(all, id)
}
