package serve

import (
	"context"
	"errors"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// MarkPublishing says that this node is about to publish a volume of a shared pool: see store.Mark. Until ended is
// called, UnmarkPublished leaves the mark: nothing is mounted yet.
func (v *Visit) MarkPublishing(ctx context.Context, id volume.ID) (ended func(), err error) {
	if !v.Pool.Config.Shared {
		return func() {}, nil
	}
	done, err := v.Pool.Node.marking.Wait(ctx, id)
	if err != nil {
		return nil, err
	}
	defer done()
	if ended, err = v.Pool.Node.publishing.TryShare(id); err != nil {
		return nil, err
	}
	if err := v.Store.Nodes().Mark(id); err != nil {
		ended()
		return nil, err
	}
	return ended, nil
}

// UnmarkPublished takes the mark of a volume back once that is published nowhere on this
// node, and no call is about to. As long as a device that may be the volume's does not answer, that is unknown, and
// the mark stays for the next check: it keeps other nodes from deleting, and blocks nothing else.
func (v *Visit) UnmarkPublished(ctx context.Context, of *reconcile.VolumeUse) error {
	if !v.Pool.Config.Shared {
		return nil
	}
	done, err := v.Pool.Node.marking.Wait(ctx, of.ID)
	if err != nil {
		return err
	}
	defer done()
	unlock, err := v.Pool.Node.publishing.TryLock(of.ID)
	if errors.Is(err, volume.ErrBusy) {
		return nil // if that publication fails, it takes the mark back
	}
	if err != nil {
		return err
	}
	defer unlock()
	used, err := of.Used()
	if errors.Is(err, loop.ErrSilent) {
		return nil
	}
	if err != nil || used {
		return err
	}
	return v.Store.Nodes().Unmark(of.ID)
}

// restoreMarks marks what this node has published without a mark: the pool was not shared before,
// or another node took this one for gone.
func (v *Visit) restoreMarks(context.Context) error {
	marked, err := v.Store.Nodes().Marked()
	if err != nil {
		return err
	}
	published, err := reconcile.PublishedVolumes(v.View())
	if err != nil {
		return err
	}
	for id := range published {
		if marked[id.String()] {
			continue
		}
		if err := v.unlessBusy(id, func() error { return v.restoreMark(id) }); err != nil {
			return err
		}
	}
	return nil
}

func (v *Visit) restoreMark(id volume.ID) error {
	e, d, err := v.View().Lookup(id)
	if err != nil || d == nil {
		return err
	}
	defer func() { _ = d.Close() }() // opened for reading
	used, err := v.Use(id, e, d).Used()
	if err != nil || !used {
		return err
	}
	err = v.Store.Nodes().Mark(id)
	if errors.Is(err, volume.ErrNoSpace) { // tried again each minute; the pool serves meanwhile
		v.Pool.problems.failed(err, "Failed to restore the mark of a published volume", "volume", id.String())
		return nil
	}
	return err
}
