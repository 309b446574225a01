package inspect

import (
	"errors"
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// servedBy is the driver that serves the pool, nil for none, as this node sees it, and why that
// keeps another driver of the node from serving it.
func (r *reader) servedBy() (*store.Server, error) {
	dev, at := r.options.Dev, store.ServerByte(r.format.UUID)
	by, _, err := r.Store.Nodes().Server()
	if r.Config.Shared || dev == nil || err != nil || by.Instance == "" {
		return nil, nil //nolint:nilerr // it informs people
	}
	try := func(at int64) (certain bool, err error) {
		lock := store.NewNodeLock(dev, at)
		defer lock.Release()
		return lock.Try()
	}
	free, _ := try(at)
	here := !free
	_, err = try(at + 1)
	waits := errors.Is(err, dir.ErrLocked)
	foreign := r.Node != (volume.NodeID{}) && by.Node != r.Node.String()
	switch {
	case here && foreign:
		return &by, fmt.Errorf("%w: it is served by %s", store.ErrServed, by)
	case here && waits:
		return &by, fmt.Errorf("two drivers of this node are configured with it: it is served by %s, and another waits", by)
	case !here && !foreign:
		return nil, nil // it was killed
	}
	if waiter, _, err := r.Store.Nodes().Waiter(); err == nil && waiter.Instance != "" && waiter.Instance != by.Instance {
		return &by, fmt.Errorf("two drivers are configured with it, and it is not shared: it is served by %s, and %s waits", by, waiter)
	}
	return &by, nil
}
