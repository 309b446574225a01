package reconcile

import (
	"errors"
	"fmt"
	"sync/atomic"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// LearnForeign notes what others hold on the pool's filesystem while nothing at all
// can be ours. Where it is not counted what volumes hold it is not known otherwise.
func (p *Pool) LearnForeign(space dir.Space) {
	if p.Config.Shared || p.Keeper.Unenforced() == nil {
		return // what others promised meanwhile is not known, or Held knows better
	}
	p.Ledger.LearnForeign(space)
}

// Held is what the volumes and the trash of the pool hold, in bytes, if that is counted. It
// stores what the volumes hold of that, or volume.Unknown. What cannot be read now holds nothing, so that it counts as what others
// hold. Look is called before and after each volume is read, to measure what is taken then: one that writes and erases at
// every moment would hold much when it is read, and hide as much of what others hold if that was measured at another time.
func (p *Pool) Held(volumes *atomic.Int64, look func()) (bytes int64, counted bool) {
	if !p.Counts() {
		volumes.Store(volume.Unknown)
		return 0, false
	}
	used, inodes, trashed, err := p.used(look)
	if err != nil {
		p.Failed(err, "Failed to count all that the pool's volumes hold; the rest counts as what others hold on its filesystem")
	} else {
		volumes.Store(used)
	}
	return used + inodes + trashed, true
}

// Counts reports whether it is counted what the volumes of the pool hold.
func (p *Pool) Counts() bool {
	return p.Keeper.Kind() != "" && !p.Config.Shared && !p.anyUnlimited()
}

// anyUnlimited reports whether there is a promise of which the use is not counted.
func (p *Pool) anyUnlimited() bool {
	return p.Ledger.Any(func(c ledger.Card) bool { return c.Is(ledger.HasRecord) && !p.Keeper.Enforces(c) })
}

// used is what the volumes of the pool hold, what their inodes take that no quota counts, and what its trash holds, each no more than
// was promised, and without what users have shared with others. A block volume on btrfs that shares blocks may take more, since an extent
// is there until all of it is overwritten: that counts as foreign. The error is about what could not be read.
func (p *Pool) used(look func()) (volumes, inodes, trash int64, err error) {
	thrown := p.Ledger.Trash().Names(true) // before the volumes: one that is deleted meanwhile is not counted twice
	families := make(map[string]int64)
	look()
	for id, c := range p.Limited() {
		p.Steps.Add(1) // when the pool is opened this is part of the check
		used, readErr := p.usedBy(id, c)
		look()
		if !c.Is(ledger.Shares) {
			used.Bytes -= used.Shared
		}
		used.Bytes = min(used.Bytes, c.Promised+c.ToOverwrite())
		if readErr == nil && c.Is(ledger.Shares) {
			readErr = p.addToFamily(families, id, used.Bytes)
			used.Bytes = 0
		}
		if readErr != nil {
			err = fmt.Errorf("%s: %w", id.Named(), readErr) // of many one is enough for the log
			continue
		}
		volumes += used.Bytes
		inodes += p.Ledger.InodesHold(c, used.Inodes)
	}
	for _, most := range families {
		volumes += most
	}
	if workErr := p.Store.OpenWork(); workErr != nil {
		return volumes, inodes, 0, errors.Join(err, workErr)
	}
	return volumes, inodes, p.usedByTrash(thrown, families), err
}

func (p *Pool) usedBy(id volume.ID, c ledger.Card) (quota.Usage, error) {
	in, err := p.Store.Parent(id)
	if err != nil {
		return quota.Usage{}, err
	}
	return p.Keeper.Accounting.UsedBy(in, id.String(), c)
}

// addToFamily keeps the largest use of each family, of those within the promises of its members.
// All are charged in full for the blocks that they share, which are there once: the sum of their
// uses would be more than what is taken, and would hide what others hold. The largest is the least
// that the family can take, so that what it takes besides counts as foreign, and is not sold.
func (p *Pool) addToFamily(families map[string]int64, id volume.ID, used int64) error {
	rec, err := p.Store.Records().Read(id)
	if err != nil || rec == nil {
		return err // without a record it is being removed
	}
	families[rec.Family] = max(families[rec.Family], used)
	return nil
}

// usedByTrash is what those pieces of trash hold of their promises besides what families of volumes hold, and notes of each what it
// holds. One that cannot be counted holds what it did at last. If it is not known whether a piece shares blocks with a family, as of a
// copy that failed, and after a start, that may be all that it holds.
func (p *Pool) usedByTrash(names []string, families map[string]int64) (sum int64) {
	for _, name := range names {
		family, known := p.Ledger.Trash().Family(name)
		used, shared := p.measurePiece(name)
		if family == "" {
			used -= shared
		}
		if promised := p.Ledger.Trash().Promise(name); promised != volume.Unknown {
			used = min(used, promised)
		}
		used = max(0, used)
		switch {
		case family != "":
			used = max(0, used-families[family])
			families[family] += used
		case !known && len(families) > 0:
			used = 0
		}
		sum += used
	}
	return sum
}

// measurePiece notes what a piece of trash holds, and returns that with what of it other directories count too. Of one that came
// without a limit no quota knows.
func (p *Pool) measurePiece(name string) (bytes, shared int64) {
	used := quota.Usage{Bytes: volume.Unknown}
	err := p.Store.Trash().In(name, func(in *dir.Dir, entry string) error {
		id, err := p.Keeper.IDs.In(in, entry)
		if err == nil && id != 0 {
			used, err = p.Keeper.Accounting.UsedIn(in, entry, id)
		}
		return err
	})
	switch {
	case err != nil:
		return p.uncounted(name, err), 0
	case used.Bytes != volume.Unknown:
		p.Ledger.Trash().Measured(name, used.Bytes)
	}
	return used.Bytes, used.Shared
}

// MeasureTrash has monitoring know what is about to be erased. Without quotas it is not known.
func (p *Pool) MeasureTrash() {
	if p.Keeper.Kind() != "" {
		p.usedByTrash(p.Ledger.Trash().Names(true), make(map[string]int64))
	}
}

// HeldBy is what an entry occupies of which it is not known what it was promised, in bytes, or
// volume.Unknown.
func (p *Pool) HeldBy(in *dir.Dir, name string, carried quota.ID) int64 {
	if bytes := p.Keeper.Accounting.UsedByID(p.Store.Root(), carried); bytes != volume.Unknown {
		return bytes
	}
	return store.Measured(in, name)
}

// uncounted logs, once in a while, a piece of trash that cannot be counted, and
// returns what it held at last.
func (p *Pool) uncounted(name string, err error) int64 {
	last, report := p.Ledger.Trash().Unmeasured(name)
	if report {
		p.Failed(err, "Failed to count what a trash entry holds", "trash", name)
	}
	return last
}
