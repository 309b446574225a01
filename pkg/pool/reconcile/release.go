package reconcile

import (
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// ReleaseLost gives back the id of a lost volume that was deleted. Should its directory be somewhere else, that
// keeps the id, which is then not given again.
func (p *Leftovers) ReleaseLost(id volume.ID, e store.Entry) {
	c := CardOf(e)
	if !p.Enforcer.Enforces(c) {
		return
	}
	if err := p.Enforcer.IDs.Release(p.Store.Root(), c.QuotaID()); err != nil {
		p.Log.Error(err, "The limit of a deleted volume is still there", "volume", id.String())
	}
}

// ReleaseUnused removes limits that no directory has.
func (p *Leftovers) ReleaseUnused() {
	released, err := p.Enforcer.IDs.ReleaseUnused(p.Store.Root(), func() { p.Steps.Add(1) })
	if err != nil {
		p.Log.Error(err, "Failed to remove limits that no directory has")
	}
	if released > 0 {
		p.Log.Info("Removed limits that no directory has", "limits", released)
	}
}
