package pool

import (
	"context"

	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/scan"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// checkQuota notices quotas that were switched on or off since the pool was opened,
// or that the filesystem was mounted anew without or with.
func (v *visit) checkQuota() error {
	keeper, err := v.pool.limits().Keeper(v.store.Root(), v.keeper.Claims())
	if err != nil {
		return err
	}
	if !keeper.Like(v.keeper) {
		v.keeper = keeper
		v.changeKeeper()
	}
	if v.keeper.Kind() != "" {
		v.restoreAgain()
	}
	now := v.scan()
	now.Keeper = keeper
	return now.Unfit(v.pool.limits())
}

// limits are the options that say who is to enforce the sizes of the pool's volumes.
func (p *Pool) limits() limit.Options {
	return limit.Options{
		Detect: p.options.DetectQuota, Enforcement: p.config.Enforcement, BytesPerInode: p.config.BytesPerInode,
	}
}

// changeKeeper has the calls to come use what this visit has.
func (v *visit) changeKeeper() {
	now := *v.pool.identity.Load()
	now.keeper = v.keeper
	v.pool.identity.Store(&now)
	v.pool.ledger.SetNewInodes(v.keeper.NewInodes())
	if why := v.keeper.Unenforced(); why != nil {
		v.pool.log.Error(why, "from now on the sizes of new volumes are promised but not enforced")
	} else {
		v.pool.log.Info("from now on the kernel enforces the sizes of new volumes", "quota", v.keeper.Kind())
	}
	v.queueLimitChecks()
}

// queueLimitChecks has the checks compare all limits with the promises.
func (v *visit) queueLimitChecks() {
	v.pool.unrestored = make(map[volume.ID]struct{})
	for id := range v.scan().Limited() {
		v.pool.unrestored[id] = struct{}{}
	}
}

// restoreAgain puts limits back while the pool serves, each when no call works on its
// volume: what is busy now is left for the next check.
func (v *visit) restoreAgain() {
	for id := range v.pool.unrestored {
		v.pool.steps.Add(1)
		unlock, err := v.tryLock(id)
		if err != nil {
			continue
		}
		delete(v.pool.unrestored, id)
		e, d, err := v.scan().Lookup(id)
		if d != nil {
			_ = d.Close()
		}
		if c := scan.CardOf(e); err == nil && v.scan().Keeps(c) {
			err = v.restoreLimit(id, c)
		}
		unlock()
		v.logUnrestored(id, err)
	}
	if len(v.pool.unrestored) == 0 {
		v.pool.unrestored = nil // a map keeps the room of what it once had
	}
}

func (v *visit) logUnrestored(id volume.ID, err error) {
	if err != nil {
		v.pool.log.Error(err, "failed to restore the limit of a volume", "volume", id.String())
	}
}

// enforcing reports whether new volumes get limits.
func (p *Pool) enforcing() bool {
	id := p.identity.Load()
	return id != nil && id.keeper.Unenforced() == nil
}

// releaseLost gives back the id of a lost volume that was deleted. Should its
// directory be somewhere else, it keeps the id, which is then not given again.
func (v *visit) releaseLost(id volume.ID, e store.Entry) {
	c := scan.CardOf(e)
	if !v.keeper.Enforces(c) {
		return
	}
	if err := v.keeper.Release(v.store.Root(), c.QuotaID()); err != nil {
		v.pool.log.Error(err, "the limit of a deleted volume is still there", "volume", id.String())
	}
}

// releaseUnused removes limits that nothing is counted by.
func (v *visit) releaseUnused(context.Context) error {
	released, err := v.keeper.ReleaseUnused(v.store.Root())
	if err != nil {
		v.pool.log.Error(err, "failed to remove limits that no directory has")
	}
	if released > 0 {
		v.pool.log.Info("removed limits that no directory has", "limits", released)
	}
	return nil
}

// restoreLimits compares all limits with the promises. One that cannot be put back
// is logged, and shows in the condition of its volume; the others are served.
func (v *visit) restoreLimits(context.Context) error {
	if v.locksNodes() { // others may be changing both
		v.queueLimitChecks()
		v.restoreAgain()
		return nil
	}
	for id, c := range v.scan().Limited() {
		v.pool.steps.Add(1)
		v.logUnrestored(id, v.restoreLimit(id, c))
	}
	return nil
}

// restoreLimit puts back a limit that is not what was promised.
func (v *visit) restoreLimit(id volume.ID, c ledger.Card) error {
	in, err := v.store.Parent(id)
	if err != nil {
		return err
	}
	d, err := in.Open(id.String())
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }() // opened for reading
	found, restored, err := v.keeper.Restore(d, c)
	if err != nil || !restored {
		return err
	}
	v.pool.log.Info("restored the limit of a volume", "volume", id.String(), "had", found.Bytes, "promised", v.keeper.Limit(c).Bytes)
	v.pool.ledger.Restored()
	return nil
}
