package serve

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// MarkPublishing says that this node is about to publish a volume of a shared pool: see store.Mark. Until ended is
// called, UnmarkPublished leaves the mark: nothing is mounted yet. A volume for several nodes is published from a read-only
// pool without: none can delete it meanwhile. One for one node is not, since another may publish it too, and both write to it
// later. Errors: volume.ErrNoSpace, volume.ErrUnavailable.
func (in *Visit) MarkPublishing(ctx context.Context, id volume.ID, multiNode bool) (ended func(), err error) {
	if !in.Pool.Config.Shared {
		return func() {}, nil
	}
	done, err := in.Pool.Node.marking.Wait(ctx, id)
	if err != nil {
		return nil, err
	}
	defer done()
	if ended, err = in.Pool.Node.publishing.TryShare(id); err != nil {
		return nil, err
	}
	err = in.Store.Nodes().Mark(id)
	if errors.Is(err, syscall.EROFS) {
		if multiNode {
			return ended, nil
		}
		err = in.Pool.Unavailable(fmt.Errorf("without a mark that it is published here, other nodes could publish it too: %w", err))
	}
	if err != nil {
		ended()
		return nil, err
	}
	return ended, nil
}

// UnmarkPublished takes the mark of a volume back once that is published nowhere on this
// node, and no call is about to. As long as a device that may be the volume's does not answer, that is unknown, and
// the mark stays for the next check: it keeps other nodes from deleting, and blocks nothing else.
func (in *Visit) UnmarkPublished(ctx context.Context, of *reconcile.VolumeUse) error {
	done, err := in.Pool.Node.marking.Wait(ctx, of.ID)
	if err != nil {
		return err
	}
	defer done()
	unlock, err := in.Pool.Node.publishing.TryLock(of.ID)
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
	return in.Store.Nodes().Unmark(of.ID)
}

// restoreMarks marks what this node has published without a mark: by the upstream driver, or an administrator took this node to be off.
func (in *Visit) restoreMarks(context.Context) error {
	marked, err := in.Store.Nodes().Marked()
	if err != nil {
		return err
	}
	published, err := reconcile.PublishedVolumes(in.View())
	if err != nil {
		return err
	}
	for id := range published {
		if marked[id.String()] {
			continue
		}
		if err := in.unlessBusy(id, func() error { return in.restoreMark(id) }); err != nil {
			return err
		}
	}
	return nil
}

func (in *Visit) restoreMark(id volume.ID) error {
	e, d, err := in.View().Lookup(id)
	if err != nil || d == nil {
		return err
	}
	defer func() { _ = d.Close() }() // opened for reading
	used, err := in.Use(id, e, d).Used()
	if err != nil || !used {
		return err
	}
	err = store.IgnoreReadOnly(in.Store.Nodes().Mark(id))
	if errors.Is(err, volume.ErrNoSpace) { // tried again each minute; the pool serves meanwhile
		in.Pool.problems.failed(err, "Failed to restore the mark of a published volume", "volume", id.String())
		return nil
	}
	return err
}
