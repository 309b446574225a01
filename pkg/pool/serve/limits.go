package serve

// checkQuota notices quotas that were switched on or off since the pool was opened,
// or that the filesystem was mounted anew without or with.
func (c *checks) checkQuota(in *Visit) error {
	enforcer, err := in.Pool.Limits().Enforcer(in.Store.Root(), in.Enforcer.IDs.Claims)
	if err != nil {
		return err
	}
	if !enforcer.Like(in.Enforcer) {
		in.Enforcer = enforcer
		c.changeEnforcer(in)
	}
	if in.Enforcer.Kind() != "" {
		if c.limitsDiffer.Swap(false) {
			c.queueLimitChecks(in)
		}
		c.restoreQueued(in)
	}
	now := *in.View()
	now.Enforcer = enforcer
	return now.MustNotServe(in.Pool.Limits())
}

// changeEnforcer has the calls to come use what this visit has.
func (c *checks) changeEnforcer(in *Visit) {
	now := *in.Pool.identity.Load()
	now.enforcer = in.Enforcer
	in.Pool.identity.Store(&now)
	in.Pool.Ledger.SetCosts(in.Enforcer.Sizes.NewInodes(), in.Enforcer.Sizes.Costs())
	if trees, err := in.trees(); err == nil { // or the next count does it
		in.Pool.Ledger.SetTrees(trees)
	}
	if why := in.Enforcer.Unenforced(); why != nil {
		in.Pool.Log.Error(why, "From now on the sizes of new volumes are promised but not enforced")
	} else {
		in.Pool.Log.Info("From now on the kernel enforces the sizes of new volumes", "quota", in.Enforcer.Kind())
	}
	c.queueLimitChecks(in)
}

// queueLimitChecks has the checks compare all limits with the promises.
func (c *checks) queueLimitChecks(in *Visit) {
	c.unrestored = in.Repair().AllLimits()
	c.unrestorable.Store(0)
}

// restoreQueued restores limits while the pool serves. What is busy now is left for the next check.
func (c *checks) restoreQueued(in *Visit) {
	c.unrestorable.Add(int64(in.Repair().LimitsOf(c.unrestored)))
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
func (c *checks) restoreLimits(in *Visit) {
	if in.Pool.Config.Shared { // others may be changing both
		c.restoreLimitsAgain(in)
	} else {
		in.Repair().Limits()
	}
}

// restoreLimitsAgain is restoreLimits while calls or other nodes work in the pool.
func (c *checks) restoreLimitsAgain(in *Visit) {
	c.queueLimitChecks(in)
	c.restoreQueued(in)
}
