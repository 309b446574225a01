package pool

import (
	"context"
	"errors"
	"iter"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
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
	return v.unfit(keeper)
}

// limits are the options that say who is to enforce the sizes of the pool's volumes.
func (p *Pool) limits() limit.Options {
	return limit.Options{
		Detect: p.options.DetectQuota, Enforcement: p.config.Enforcement, BytesPerInode: p.config.BytesPerInode,
	}
}

// unfit is why the pool must not serve now: an ext4 that is read-only has its quotas off, and
// serves what it has all the same, since nothing in it can grow.
func (v *visit) unfit(keeper *limit.Keeper) error {
	err := v.pool.limits().Unfit(keeper)
	if err == nil {
		return nil
	}
	if space, spaceErr := v.store.Space(); spaceErr == nil && space.ReadOnly {
		return nil
	}
	return err
}

// changeKeeper has the calls to come use what this visit has.
func (v *visit) changeKeeper() {
	now := *v.pool.identity.Load()
	now.keeper = v.keeper
	v.pool.identity.Store(&now)
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
	for id := range v.limited() {
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
		e, d, err := v.lookup(id)
		if d != nil {
			_ = d.Close()
		}
		if c := cardOf(e); err == nil && v.keeps(c) {
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

// enforced reports whether the kernel enforces the size of a volume; not before the pool is
// opened.
func (p *Pool) enforced(c ledger.Card) bool {
	id := p.identity.Load()
	return id != nil && id.keeper.Enforces(c)
}

// releaseLost gives back the id of a lost volume that was deleted. Should its
// directory be somewhere else, it keeps the id, which is then not given again.
func (v *visit) releaseLost(id volume.ID, e store.Entry) {
	c := cardOf(e)
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

// claim notes the id that counts a volume, and reports two records with one id.
func (v *visit) claim(id volume.ID, e store.Entry) {
	if e.Record == nil || e.Record.ProjectID == 0 {
		return
	}
	project := quota.ID(e.Record.ProjectID)
	if !v.keeper.Claim(v.store.Root(), id.String(), project, e.Record.UID) && !v.pool.ledger.Known(id).Recorded() {
		v.pool.log.Error(errTwoRecords, "the size of one of them is not enforced", "volume", id.String(), "projectID", project)
	}
}

var errTwoRecords = errors.New("two volumes are recorded with one project id: copy the content of the one that is abnormal into a new volume")

// restoreLimits compares all limits with the promises. One that cannot be put back
// is logged, and shows in the condition of its volume; the others are served.
func (v *visit) restoreLimits(context.Context) error {
	if v.locksNodes() { // others may be changing both
		v.queueLimitChecks()
		v.restoreAgain()
		return nil
	}
	for id, c := range v.limited() {
		v.pool.steps.Add(1)
		v.logUnrestored(id, v.restoreLimit(id, c))
	}
	return nil
}

// restoreLimit puts back a limit that is not what was promised.
func (v *visit) restoreLimit(id volume.ID, c ledger.Card) error {
	d, err := v.store.Root().Open(id.String())
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

// limitDiffers reports whether the kernel enforces another size than was promised. The
// caller holds no lock, so that both may be changing: what differs is checked again
// while no call works on the volume.
func (v *visit) limitDiffers(id volume.ID, d *dir.Dir, c ledger.Card, has quota.Limit) (bool, error) {
	if ok, err := v.keeper.Agrees(d, c, has); err != nil || ok {
		return false, err
	}
	unlock, err := v.tryLock(id)
	if errors.Is(err, volume.ErrBusy) {
		return false, nil // a call is at work on it
	}
	if err != nil {
		return false, err
	}
	defer unlock()
	rec, err := v.store.ReadRecord(id)
	if err != nil || rec == nil {
		return false, err
	}
	c = cardOf(store.Entry{Record: rec})
	usage, err := v.keeper.Usage(d, c)
	if err != nil {
		return false, err
	}
	ok, err := v.keeper.Agrees(d, c, usage.Limit)
	return err == nil && !ok, err
}

// keeps reports whether the volume is there and the kernel enforces its size.
func (v *visit) keeps(c ledger.Card) bool { return c.Is(ledger.HasDirectory) && v.keeper.Enforces(c) }

// limited are the volumes whose size is kept.
func (v *visit) limited() iter.Seq2[volume.ID, ledger.Card] { return v.pool.ledger.Each(v.keeps) }
