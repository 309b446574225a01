package serve

import (
	"fmt"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/served"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

const errForgotten = "failed to remember the volumes of the pool: were it taken out of the configuration, they would count as deleted"

// noted is what is remembered of the pool, without its volumes.
func (p *Pool) noted(id *opened) served.Entry {
	return served.Entry{Name: p.Config.Name.String(), Path: p.Config.Path, UUID: id.Format.UUID, Shared: p.Config.Shared}
}

// remember notes what the pool has, with the snapshots of the upstream KubeVirt driver that are in it.
func (in *Visit) remember(id *opened) {
	p := in.Pool
	snapshots, err := in.upstreamInside()
	if err == nil {
		err = p.note.Write(p.noted(id), func() []string {
			all := []string{}
			for _, id := range snapshots {
				all = append(all, id.String())
			}
			for id := range p.Ledger.Each(ledger.Info.Exists) {
				all = append(all, id.String())
			}
			slices.Sort(all)
			return slices.Compact(all)
		})
	}
	if err != nil {
		p.Log.Error(err, errForgotten)
	}
}

// OutOfUse returns ErrPrecondition if a volume may be in a pool that this node has served, and that is not configured
// any more.
func (n *Node) OutOfUse(id volume.ID) error { return n.outOfUse(id, (*served.Entry).May) }

// KnownOutOfUse returns ErrPrecondition if such a pool is known to have the volume.
func (n *Node) KnownOutOfUse(id volume.ID) error { return n.outOfUse(id, (*served.Entry).Had) }

// AnyOutOfUse returns ErrPrecondition if such a pool may have anything. No note has names that are none of volumes.
func (n *Node) AnyOutOfUse(id volume.ID) error {
	return n.outOfUse(id, func(p *served.Entry, _ string) bool { return p.Partial || len(p.Volumes) > 0 })
}

func (n *Node) outOfUse(id volume.ID, has func(p *served.Entry, id string) bool) error {
	pools, err := n.Options.Served.OutOfUse(n.uses)
	if err != nil {
		return fmt.Errorf("%s: %w: cannot read which pools this node has served: %w", id.Named(), volume.ErrUnavailable, err)
	}
	for _, p := range pools {
		if has(&p, id.String()) {
			return fmt.Errorf("%s: %w: %s", id.Named(), volume.ErrPrecondition, n.Options.Served.Advice(p))
		}
	}
	return nil
}

// uses reports whether a pool is served, whatever its path is.
func (n *Node) uses(p served.Entry) bool {
	return slices.ContainsFunc(n.Pools, func(here *Pool) bool {
		id := here.identity.Load()
		if id == nil { // a call for a volume answers that it is not open
			return here.Config.Path == p.Path
		}
		return id.Format.UUID == p.UUID
	})
}
