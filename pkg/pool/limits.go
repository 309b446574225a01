package pool

import (
	"context"

	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
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
		v.restoreQueued()
	}
	now := *v.scan()
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
func (v *visit) queueLimitChecks() { v.pool.unrestored = v.repair().AllLimits() }

// restoreQueued restores limits while the pool serves. What is busy now is left for the next check.
func (v *visit) restoreQueued() {
	v.repair().LimitsOf(v.pool.unrestored)
	if len(v.pool.unrestored) == 0 {
		v.pool.unrestored = nil // a map keeps the room of what it once had
	}
}

// enforcing reports whether new volumes get limits.
func (p *Pool) enforcing() bool {
	id := p.identity.Load()
	return id != nil && id.keeper.Unenforced() == nil
}

// restoreLimits compares all limits with the promises, before the pool serves.
func (v *visit) restoreLimits(ctx context.Context) error {
	if v.locksNodes() { // others may be changing both
		return v.restoreLimitsAgain(ctx)
	}
	v.repair().Limits()
	return nil
}

// restoreLimitsAgain is restoreLimits while calls or other nodes work in the pool.
func (v *visit) restoreLimitsAgain(context.Context) error {
	v.queueLimitChecks()
	v.restoreQueued()
	return nil
}
