package reconcile

import (
	"errors"
	"fmt"
	"sync/atomic"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Usage measures what the volumes and the trash of a pool hold.
type Usage struct {
	shared   bool // between nodes
	store    *store.Store
	enforcer *limit.Enforcer
	ledger   *ledger.Ledger
	steps    *atomic.Uint64
	failed   func(err error, what string, about ...any)
}

// Usage is what the pool holds.
func (p *View) Usage() Usage {
	return Usage{p.Config.Shared, p.Store, p.Enforcer, p.Ledger, p.Steps, p.Failed}
}

// LearnForeign notes what others hold on the pool's filesystem while nothing at all
// can be ours. Where it is not counted what volumes hold it is not known otherwise.
func (u Usage) LearnForeign(space dir.Space) {
	if u.shared || u.enforcer.Unenforced() == nil {
		return // what others promised meanwhile is not known, or Held knows better
	}
	u.ledger.LearnForeign(space)
}

// Held is what volumes and trash hold, in bytes.
type Held struct {
	Bytes int64
	Alone int64 // what of the Bytes limit.Enforcer.Beside has too: on btrfs no more than what is in nothing else
	// Shared is what each shares with anything, and Families what families may share with others: all of them, and the one with most.
	Shared, Families, Family int64
}

// Add adds what others hold.
func (h *Held) Add(more Held) {
	h.Bytes += more.Bytes
	h.Alone += more.Alone
	h.Shared += more.Shared
	h.Families += more.Families
	h.Family = max(h.Family, more.Family)
}

// Others is what is of no volume and no trash, in bytes: what is alone in a subvolume, and what each shares with anything.
type Others struct{ Alone, Shared int64 }

// Others is what is left of all that limit.Enforcer.Beside has.
func (h Held) Others(all quota.Usage) Others {
	return Others{all.Alone() - h.Alone, max(0, all.Shared-h.Shared)}
}

// Foreign is what others hold of so many bytes that are taken on a filesystem. Blocks that files of volumes share are counted for each of
// those, and what is moved while all are counted may be counted twice: so it is at least what others have alone. What others share with each
// other is at most half of what each of them shares, quotas count some of the trees not at all and the others once, and of what is taken no
// more is theirs than if no two families had the same blocks.
func (h Held) Foreign(taken int64, others Others, trees quota.Trees) int64 {
	alone := min(others.Alone, taken)
	most := taken - h.Bytes + h.Families - h.Family
	return max(taken-h.Bytes, min(alone+others.Shared/2+trees.Uncounted, most, taken), alone)
}

// Held is what the volumes and the trash of the pool hold if that is counted. It
// stores what the volumes hold of that, or volume.Unknown. What cannot be read now holds nothing, so that it counts as what others
// hold. Look is called before and after each volume is read, to measure what is taken then: one that writes and erases at
// every moment would hold much when it is read, and hide as much of what others hold if that was measured at another time.
func (u Usage) Held(volumes *atomic.Int64, look func()) (all Held, counted bool) {
	if !u.Counts() {
		volumes.Store(volume.Unknown)
		return Held{}, false
	}
	used, inodes, trashed, err := u.used(look)
	if err != nil {
		u.failed(err, "Failed to count all that the pool's volumes hold; the rest counts as what others hold on its filesystem")
	} else {
		volumes.Store(used.Bytes)
	}
	all = Held{Bytes: inodes}
	all.Add(used)
	all.Add(trashed)
	if u.enforcer.Kind() != quota.Btrfs {
		all = Held{Bytes: all.Bytes}
	}
	return all, true
}

// Counts reports whether it is counted what the volumes of the pool hold.
func (u Usage) Counts() bool {
	return u.enforcer.Kind() != "" && !u.shared && !u.anyUnlimited()
}

// anyUnlimited reports whether there is a promise of which the use is not counted.
func (u Usage) anyUnlimited() bool {
	return u.ledger.Any(func(c ledger.Info) bool { return c.Is(ledger.HasRecord) && !u.enforcer.Enforces(c) })
}

// used is what the volumes of the pool hold, what their inodes take that no quota counts, and what its trash holds, each no more than
// was promised, and without what users have shared with others. A block volume on btrfs that shares blocks may take more, since an extent
// is there until all of it is overwritten: that counts as foreign. The error is about what could not be read.
func (u Usage) used(look func()) (volumes Held, inodes int64, trash Held, err error) {
	thrown := u.ledger.Trash().Names(true) // before the volumes: one that is deleted meanwhile is not counted twice
	families := make(families)
	look()
	for id, c := range u.ledger.Each(isLimited(u.enforcer)) {
		u.steps.Add(1) // when the pool is opened this is part of the check
		used, readErr := u.usedBy(id, c)
		look()
		most := c.Promised + c.ToOverwrite() + c.OfExtents(u.enforcer.Sizes.Costs())
		volumes.Alone += min(used.Alone(), most)
		volumes.Shared += used.Shared
		if !c.Is(ledger.Shares) {
			used.Bytes -= used.Shared
		}
		used.Bytes = min(used.Bytes, most)
		if readErr == nil && c.Is(ledger.Shares) {
			var more Held
			more, readErr = u.addToFamily(families, id, used)
			volumes.Add(more)
			used.Bytes = 0
		}
		if readErr != nil {
			err = fmt.Errorf("%s: %w", id.Named(), readErr) // of many one is enough for the log
			continue
		}
		volumes.Bytes += used.Bytes
		inodes += u.ledger.InodesHold(c, used.Inodes)
	}
	if workErr := u.store.OpenWork(); workErr != nil {
		return volumes, inodes, Held{}, errors.Join(err, workErr)
	}
	return volumes, inodes, u.usedByTrash(thrown, families), err
}

func (u Usage) usedBy(id volume.ID, c ledger.Info) (quota.Usage, error) {
	in, err := u.store.Parent(id)
	if err != nil {
		return quota.Usage{}, err
	}
	return u.enforcer.UsedBy(in, id.String(), c)
}

// families are what each family holds: the largest use, of those within the promises of its members, and the most that one shares.
// All are charged in full for the blocks that they share, which are there once: the sum of their
// uses would be more than what is taken, and would hide what others hold. The largest is the least
// that the family can take, so that what it takes besides counts as foreign, and is not sold.
type families map[string]quota.Usage

// add adds a member, and returns what the families hold more.
func (f families) add(family string, used, shared int64) Held {
	before := f[family]
	now := quota.Usage{Bytes: max(before.Bytes, used), Shared: max(before.Shared, min(used, shared))}
	f[family] = now
	return Held{Bytes: now.Bytes - before.Bytes, Families: now.Shared - before.Shared, Family: now.Shared}
}

func (u Usage) addToFamily(all families, id volume.ID, used quota.Usage) (more Held, err error) {
	rec, err := u.store.Records().Read(id)
	if err != nil || rec == nil {
		return Held{}, err // without a record it is being removed
	}
	return all.add(rec.Family, used.Bytes, used.Shared), nil
}

// usedByTrash is what those pieces of trash hold of their promises besides what families of volumes hold, and notes of each what it
// holds. One that cannot be counted holds what it did at last. If it is not known whether a piece shares blocks with a family, as of a
// copy that failed, and after a start, that may be all that it holds.
func (u Usage) usedByTrash(names []string, all families) (sum Held) {
	for _, name := range names {
		family, known := u.ledger.Trash().Family(name)
		used, shared := u.measurePiece(name)
		alone := max(0, used-shared)
		if family == "" {
			used = alone
		}
		if promised := u.ledger.Trash().Promise(name); promised != volume.Unknown {
			used, alone = min(used, promised), min(alone, promised)
		}
		used = max(0, used)
		switch {
		case family != "":
			sum.Add(all.add(family, used, shared))
			used = 0
		case !known && len(all) > 0:
			used = 0
		}
		sum.Add(Held{Bytes: used, Alone: alone, Shared: shared})
	}
	return sum
}

// measurePiece notes what a piece of trash holds, and returns that with what of it other directories count too. Of one that came
// without a limit no quota knows.
func (u Usage) measurePiece(name string) (bytes, shared int64) {
	used := quota.Usage{Bytes: volume.Unknown}
	err := u.store.Trash().In(name, func(in *dir.Dir, entry string) error {
		id, err := u.enforcer.IDs.In(in, entry)
		if err == nil && id != 0 {
			used, err = u.enforcer.UsedIn(in, entry, id)
		}
		return err
	})
	switch {
	case err != nil:
		return u.uncounted(name, err), 0
	case used.Bytes != volume.Unknown:
		u.ledger.Trash().Measured(name, used.Bytes)
	}
	return used.Bytes, used.Shared
}

// MeasureTrash has monitoring know what is about to be erased. Without quotas it is not known.
func (u Usage) MeasureTrash() {
	if u.enforcer.Kind() != "" {
		u.usedByTrash(u.ledger.Trash().Names(true), make(families))
	}
}

// MeasureExcess notes what the files of block volumes that share blocks take beyond their promises, where that is not counted otherwise.
func (u Usage) MeasureExcess() {
	excess := u.ledger.BeginExcess()
	if excess == nil {
		return
	}
	all := true
	for id, c := range excess.Volumes() {
		u.steps.Add(1)
		allocated, err := u.allocated(id)
		if err == nil {
			excess.Add(c, allocated)
			continue
		}
		if all && !dir.IsMissing(err) { // of many one is enough for the log; what is missing is being removed
			u.failed(err, "Failed to measure what all block volumes that share blocks take; what they took beyond their promises counts as before")
		}
		all = false
	}
	excess.End(all)
}

// allocated is the space that the file of a block volume has, in bytes.
func (u Usage) allocated(id volume.ID) (int64, error) {
	in, err := u.store.Parent(id)
	if err != nil {
		return 0, err
	}
	d, err := in.Open(id.String())
	if err != nil {
		return 0, err
	}
	defer func() { _ = d.Close() }() // opened for reading
	bytes, err := content.Allocated(id, d)
	if errors.Is(err, volume.ErrLost) {
		return 0, nil
	}
	return bytes, err
}

// HeldBy is what an entry occupies of which it is not known what it was promised, in bytes, or
// volume.Unknown.
func (u Usage) HeldBy(in *dir.Dir, name string, carried quota.ID) int64 {
	if bytes := u.enforcer.UsedByID(u.store.Root(), carried); bytes != volume.Unknown {
		return bytes
	}
	return store.Measured(in, name)
}

// uncounted logs, once in a while, a piece of trash that cannot be counted, and
// returns what it held at last.
func (u Usage) uncounted(name string, err error) int64 {
	last, report := u.ledger.Trash().Unmeasured(name)
	if report {
		u.failed(err, "Failed to count what a trash entry holds", "trash", name)
	}
	return last
}
