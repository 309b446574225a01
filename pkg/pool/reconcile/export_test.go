package reconcile

// RecoverTrashed is what recovery does with each name in the trash.
func (p *Leftovers) RecoverTrashed(name string) error { return p.recoverTrashed(name) }
