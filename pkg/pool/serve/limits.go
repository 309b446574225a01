package serve

// checkQuota notices quotas that were switched on or off since the pool was opened,
// or that the filesystem was mounted anew without or with.
func (c *checks) checkQuota(v *Visit) error {
	enforcer, err := v.Pool.Limits().Enforcer(v.Store.Root(), v.Enforcer.IDs.Claims)
	if err != nil {
		return err
	}
	if !enforcer.Like(v.Enforcer) {
		v.Enforcer = enforcer
		c.changeEnforcer(v)
	}
	if v.Enforcer.Kind() != "" {
		if c.limitsDiffer.Swap(false) {
			c.queueLimitChecks(v)
		}
		c.restoreQueued(v)
	}
	now := *v.View()
	now.Enforcer = enforcer
	return now.MustNotServe(v.Pool.Limits())
}

// changeEnforcer has the calls to come use what this visit has.
func (c *checks) changeEnforcer(v *Visit) {
	now := *v.Pool.identity.Load()
	now.enforcer = v.Enforcer
	v.Pool.identity.Store(&now)
	v.Pool.Ledger.SetInodes(v.Enforcer.Sizes.NewInodes(), v.Enforcer.Sizes.InodeBytes())
	if why := v.Enforcer.Unenforced(); why != nil {
		v.Pool.Log.Error(why, "From now on the sizes of new volumes are promised but not enforced")
	} else {
		v.Pool.Log.Info("From now on the kernel enforces the sizes of new volumes", "quota", v.Enforcer.Kind())
	}
	c.queueLimitChecks(v)
}

// queueLimitChecks has the checks compare all limits with the promises.
func (c *checks) queueLimitChecks(v *Visit) {
	c.unrestored = v.Repair().AllLimits()
	c.unrestorable.Store(0)
}

// restoreQueued restores limits while the pool serves. What is busy now is left for the next check.
func (c *checks) restoreQueued(v *Visit) {
	c.unrestorable.Add(int64(v.Repair().LimitsOf(c.unrestored)))
	if len(c.unrestored) == 0 {
		c.unrestored = nil // a map keeps the room of what it once had
	}
}

// enforcing reports whether new volumes get limits.
func (p *Pool) enforcing() bool {
	id := p.identity.Load()
	return id != nil && id.enforcer.Unenforced() == nil
}

// restoreLimits compares all limits with the promises, before the pool serves.
func (c *checks) restoreLimits(v *Visit) {
	if v.Pool.Config.Shared { // others may be changing both
		c.restoreLimitsAgain(v)
	} else {
		v.Repair().Limits()
	}
}

// restoreLimitsAgain is restoreLimits while calls or other nodes work in the pool.
func (c *checks) restoreLimitsAgain(v *Visit) {
	c.queueLimitChecks(v)
	c.restoreQueued(v)
}
