package inspect

import (
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// servedBy is the driver that serves the pool, nil for none, as this node sees it, and why that, or the pool's format, keeps another
// driver of the node from serving it.
func (r *reader) servedBy() (*store.Server, error) {
	if err := r.format.Agrees(r.Config.Shared); err != nil {
		return nil, err
	}
	dev, at := r.options.Dev, store.ServerByte(r.format.UUID)
	by, _, err := r.Store.Nodes().Server()
	if r.Config.Shared || dev == nil || err != nil || by.Instance == "" {
		return nil, nil //nolint:nilerr // it informs people
	}
	lock := store.NewNodeLock(dev, at)
	free, _ := lock.Try()
	lock.Release()
	here, foreign := !free, r.Node != (volume.NodeID{}) && by.Node != r.Node.String()
	switch {
	case here && foreign:
		return &by, fmt.Errorf("%w: it is served by %s", store.ErrServed, by)
	case !here && !foreign:
		return nil, nil // it was killed
	}
	return &by, nil
}
