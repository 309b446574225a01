package reconcile

import (
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Limits compares all limits with the promises, before calls work in the pool. One that cannot be restored is
// logged, and shows in the condition of its volume.
func (p *Repairs) Limits() {
	for id, c := range p.Ledger.Each(isLimited(p.Enforcer)) {
		p.Steps.Add(1)
		p.logUnrestored(id, p.Limit(id, c))
	}
}

// AllLimits are the volumes whose limits can be compared with their promises.
func (p *Repairs) AllLimits() map[volume.ID]struct{} {
	all := make(map[volume.ID]struct{})
	for id := range p.Ledger.Each(isLimited(p.Enforcer)) {
		all[id] = struct{}{}
	}
	return all
}

// LimitsOf is Limits for some volumes of a pool in which calls work. It removes those from the map that it has
// compared: calls are at work on the others.
func (p *Repairs) LimitsOf(volumes map[volume.ID]struct{}) {
	for id := range volumes {
		p.Steps.Add(1)
		unlock, err := p.Lock(id)
		if err != nil {
			continue
		}
		delete(volumes, id)
		e, d, err := p.Lookup(id)
		if d != nil {
			_ = d.Close() // opened for reading
		}
		if c := CardOf(e); err == nil && isLimited(p.Enforcer)(c) {
			err = p.Limit(id, c)
		}
		unlock()
		p.logUnrestored(id, err)
	}
}

func (p *Repairs) logUnrestored(id volume.ID, err error) {
	if err != nil {
		p.Log.Error(err, "Failed to restore the limit of a volume", "volume", id.String())
	}
}

// Limit restores the limit of a volume if it is not what was promised. The caller holds the volume's lock.
func (p *Repairs) Limit(id volume.ID, c ledger.Card) error {
	in, err := p.Store.Parent(id)
	if err != nil {
		return err
	}
	d, err := in.Open(id.String())
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }() // opened for reading
	found, restored, err := p.Enforcer.Restore(d, c)
	if err != nil || !restored {
		return err
	}
	p.Log.Info("Restored the limit of a volume", "volume", id.String(), "had", found.Bytes, "promised", p.Enforcer.Sizes.Limit(c).Bytes)
	p.Ledger.Restored()
	return nil
}
