package reconcile

import (
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Repairs are those of a pool that is open. Calls may be working in it.
type Repairs struct {
	In *View
	// UnlessBusy does something about a volume, unless a call of this node works on it: then it is left to that.
	UnlessBusy func(id volume.ID, do func() error) error
	// UnlessBusyAnywhere is UnlessBusy for what other nodes may work on too. The zero id stands for no volume.
	UnlessBusyAnywhere func(id volume.ID, do func() error) error
	// UnlessPromising is UnlessBusyAnywhere, with no call promising anything meanwhile.
	UnlessPromising func(id volume.ID, do func() error) error
}

// Limits compares all limits with the promises, before calls work in the pool. One that cannot be restored is
// logged, and shows in the condition of its volume.
func (p *Repairs) Limits() {
	for id, c := range p.In.Ledger.Each(isLimited(p.In.Enforcer)) {
		p.In.Step()
		p.logUnrestored(id, p.Limit(id, c))
	}
}

// AllLimits are the volumes whose limits can be compared with their promises.
func (p *Repairs) AllLimits() map[volume.ID]struct{} {
	all := make(map[volume.ID]struct{})
	for id := range p.In.Ledger.Each(isLimited(p.In.Enforcer)) {
		all[id] = struct{}{}
	}
	return all
}

// LimitsOf is Limits for some volumes of a pool in which calls work. It removes those from the map that it has
// compared: calls are at work on the others. It counts the limits that could not be restored, without those of snapshots.
func (p *Repairs) LimitsOf(volumes map[volume.ID]struct{}) (failed int) {
	for id := range volumes {
		p.In.Step()
		unlock, err := p.In.Lock(id)
		if err != nil {
			continue
		}
		delete(volumes, id)
		e, d, err := p.In.Lookup(id)
		if d != nil {
			_ = d.Close() // opened for reading
		}
		if c := InfoOf(e); err == nil && isLimited(p.In.Enforcer)(c) {
			err = p.Limit(id, c)
		}
		unlock()
		p.logUnrestored(id, err)
		if err != nil && !id.IsSnapshot() {
			failed++
		}
	}
	return failed
}

func (p *Repairs) logUnrestored(id volume.ID, err error) {
	if err != nil {
		p.In.Log.Error(err, "Failed to restore the limit of a volume", "volume", id.String())
	}
}

// Limit restores the limit of a volume if it is not what was promised. The caller holds the volume's lock.
func (p *Repairs) Limit(id volume.ID, c ledger.Info) error {
	in, err := p.In.Store.Parent(id)
	if err != nil {
		return err
	}
	d, err := in.Open(id.String())
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }() // opened for reading
	found, restored, err := p.In.Enforcer.Restore(d, c)
	if err != nil || !restored {
		return err
	}
	p.In.Log.Info("Restored the limit of a volume", "volume", id.String(), "had", found.Limit.Bytes, "promised", p.In.Enforcer.Sizes.Limit(c).Bytes)
	p.In.Ledger.Restored()
	return nil
}
