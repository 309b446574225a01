package reconcile

// RecoverTrashed is what recovery does with each name in the trash.
func (p *Leftovers) RecoverTrashed(name string) error { return p.recoverTrashed(name) }

// Turn is how many files of one piece of trash are removed at once.
const Turn = turn
