package ledger

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Filesystem is what all pools on one filesystem owe together: they share its space. It has
// no lock, so that a ledger can ask and change it while it holds its own: a change replaces the
// accounts as a whole, or is tried again if another ledger came first. So the check of a
// reservation and the reservation are one step also between pools. The zero value is ready for
// use.
type Filesystem struct{ now atomic.Pointer[accounts] }

// accounts are those of all pools on a filesystem at one time. They are never changed.
type accounts struct {
	of []account
	// base is what others than these pools occupy on the filesystem, in bytes: counted or
	// learned since the last of them came, or volume.Unknown.
	base int64
	// counted says that base was counted. Once pools have come or gone since, atMost says instead that others occupy no more than base.
	counted, atMost bool
	// kept is the sum of what erased trash may have left, in bytes: see keep.
	kept int64
	// trees is what a btrfs needs for them. What is spare was measured with base.
	trees quota.Trees
}

// An account is what one pool owes.
type account struct {
	ledger *Ledger
	origin Origin
	sums   sums
}

// An Origin is what is known of a pool from when it was made.
type Origin struct {
	Made time.Time
	// Foreign is what was taken on the filesystem then, in bytes, also by older pools.
	Foreign int64
	// Shared: other nodes promise from the pool too.
	Shared bool
	// Size is that of the filesystem as the pool sees it, in bytes: a project with a limit that its directory is in shows the
	// limit, and what is taken of that.
	Size int64
}

var noAccounts = &accounts{base: volume.Unknown}

func (f *Filesystem) load() *accounts { return cmp.Or(f.now.Load(), noAccounts) }

// change replaces the accounts. It calls change again if they were replaced meanwhile, and
// nothing happens if that returns nil.
func (f *Filesystem) change(change func(accounts) *accounts) {
	for {
		before := f.now.Load()
		after := change(*cmp.Or(before, noAccounts))
		if after == nil || f.now.CompareAndSwap(before, after) {
			return
		}
	}
}

// enter adds the account of a ledger. What others occupy has to be counted again: until now
// that included what the volumes of this pool hold. Until then the last count stands, if there was one, which can only be too high:
// nothing is promised twice.
func (f *Filesystem) enter(l *Ledger, origin Origin, owed sums) {
	f.change(func(a accounts) *accounts {
		a.of = append(slices.Clip(a.of), account{l, origin, owed})
		return a.recount(0)
	})
}

// leave takes the account of a ledger out. What its volumes hold may stay on the filesystem, as what others occupy.
func (f *Filesystem) leave(l *Ledger) {
	f.change(func(a accounts) *accounts {
		left := int64(0)
		a.of = slices.DeleteFunc(slices.Clone(a.of), func(one account) bool {
			if one.ledger == l {
				left = one.sums.promised + one.sums.trashed
			}
			return one.ledger == l
		})
		return a.recount(left)
	})
}

// recount notes that what others occupy has to be counted again. They may occupy so many bytes more than before.
func (a accounts) recount(more int64) *accounts {
	a.atMost, a.counted = (a.counted || a.atMost) && len(a.of) > 0, false
	if a.base += more; !a.atMost {
		a.base = volume.Unknown
	}
	return &a
}

// set makes known what a ledger owes.
func (f *Filesystem) set(l *Ledger, owed sums) {
	f.change(func(a accounts) *accounts { return a.with(l, owed) })
}

// with are the accounts with another sum of one ledger.
func (a accounts) with(l *Ledger, owed sums) *accounts {
	a.of = slices.Clone(a.of)
	for i := range a.of {
		if a.of[i].ledger == l {
			a.of[i].sums = owed
		}
	}
	return &a
}

// owed is the sum over all pools.
func (a *accounts) owed() (all sums) {
	for _, one := range a.of {
		all.add(one.sums)
	}
	return all
}

// foreign is what others than the pools occupy, as far as it is known. Where it was neither
// counted nor learned since the pools are together, it is what was taken when they were made,
// less what the volumes of older pools may have held of it.
func (a *accounts) foreign() (most int64) {
	if a.base != volume.Unknown {
		return a.base
	}
	for _, one := range a.of {
		left := one.origin.Foreign
		for _, other := range a.of {
			if other.origin.Made.Before(one.origin.Made) {
				left -= other.sums.promised + max(0, other.sums.held())
			}
		}
		most = max(most, left)
	}
	return most
}

// available is what one of the pools can still promise:
//
//	min(free, size × overprovision − Σ promised − foreign use) − reserve
//
// and on btrfs less what its trees need. That holds for free as well: else one disk could take all of it, with
// overprovision, and leave no room for its own record.
// Σ goes over all pools, overprovision and reserve are the pool's own. Without quotas it is
// not known what the volumes hold, and so what others hold: that is at least what exceeds all
// promises, and was once known exactly. What a volume is known to take beyond its promise comes on top of that.
func (a *accounts) available(space dir.Space, policy Policy) int64 {
	if space.ReadOnly || space.OutOfInodes() {
		return 0
	}
	owed, foreign := a.owed(), space.TakenBytes()
	if held := owed.held(); held != volume.Unknown {
		foreign = min(foreign, max(a.foreign()+held+a.excess(&owed), foreign-owed.promised))
	}
	left := min(a.forVolumes(space.FreeBytes, 1), a.forVolumes(policy.sellable(space.SizeBytes)-foreign, a.trees.Copies)-owed.promised)
	if a.trees.Room.Bounded {
		left = min(left, a.intoTrees(a.trees.Room.Left), a.intoTrees(policy.sellable(a.roomOfTrees(foreign)))-owed.promised)
	}
	return max(0, left-policy.Reserve.Of(space.SizeBytes))
}

// forVolumes is how much of so many bytes can be promised to volumes: all of it, except on btrfs. There a volume may consist of
// small files and names, which lie in the trees, and the trees are stored in so many copies, of which the quota counts one. A
// twelfth is for the trees that no quota counts: if each block of 4 KiB is an extent of its own, the trees that find extents and
// checksums take up to a twelfth of the data.
func (a *accounts) forVolumes(bytes, copies int64) int64 {
	if a.trees.Copies == 0 {
		return bytes
	}
	bytes += min(a.trees.Spare, max(0, a.base)) - a.trees.Reserve
	return max(0, bytes) / (12*copies + 1) * 12
}

// roomOfTrees is how many bytes the trees can take of the disks if the volumes leave them all that they can: beside what others hold,
// which may be on the very disk that the trees need.
func (a *accounts) roomOfTrees(foreign int64) int64 {
	room := a.trees.Room
	return max(room.Left, room.All-(foreign-min(a.trees.Spare, max(0, a.base)))*room.Loss)
}

// intoTrees is how much of so many bytes that trees can take can be promised to volumes, as in forVolumes.
func (a *accounts) intoTrees(bytes int64) int64 {
	copies := a.trees.Copies
	return max(0, bytes-a.trees.Reserve/copies) / (12*copies + 1) * 12 * copies
}

// awaited are the pools of other ledgers that have to be read before this one promises anything,
// in the order of their names.
func (a *accounts) awaited(l *Ledger) []volume.PoolName {
	return a.names(func(one account) bool { return one.ledger != l && one.sums.unread })
}

// rounded is what is available as it is reported: the size of a volume that can be made.
func (a *accounts) rounded(space dir.Space, l *Ledger) int64 {
	if len(a.awaited(l)) > 0 {
		return 0
	}
	left := a.available(space, l.policy)
	for _, one := range a.of {
		if one.ledger == l {
			left = one.sums.largest(left)
		}
	}
	step := quantum(space.SizeBytes)
	return left / step * step
}

// sharing are the pools of the other ledgers, in the order of their names.
func (a *accounts) sharing(l *Ledger) []volume.PoolName {
	return a.names(func(one account) bool { return one.ledger != l })
}

func (a *accounts) names(which func(account) bool) []volume.PoolName {
	var names []volume.PoolName
	for _, one := range a.of {
		if which(one) {
			names = append(names, one.ledger.policy.Pool)
		}
	}
	slices.SortFunc(names, func(a, b volume.PoolName) int { return cmp.Compare(a.String(), b.String()) })
	return names
}

// Join counts what the ledger owes to a filesystem, and no more to the one that it was on. It
// reports whether that is another one.
func (l *Ledger) Join(f *Filesystem, origin Origin) bool {
	l.mu.Lock()
	defer l.unlock()
	if l.on == f {
		return false
	}
	l.on.leave(l)
	f.enter(l, origin, l.sums)
	l.on = f
	return true
}

// Leave counts what the ledger owes to no filesystem until it joins one, and notes that it is to be
// read anew: another filesystem is at the pool's path.
func (l *Ledger) Leave() {
	l.mu.Lock()
	defer l.unlock()
	l.on.leave(l)
	l.on = &Filesystem{}
	l.sums.unread = true
	l.on.enter(l, Origin{}, l.sums)
}

// A Count is a counting of what others than the pools occupy on their filesystem.
type Count struct {
	ledger *Ledger
	kept   int64 // before it began
}

// BeginCount begins a count. Trash that is erased before its End may have been counted as the pools'.
func (l *Ledger) BeginCount() Count {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Count{l, l.on.load().kept}
}

// End notes how many bytes others than the pools occupy on the filesystem, as was
// counted, and what its trees need.
func (c Count) End(bytes int64, trees quota.Trees) {
	c.ledger.mu.Lock()
	defer c.ledger.mu.Unlock()
	c.ledger.on.change(func(a accounts) *accounts {
		a.base, a.trees = max(0, bytes)+max(0, a.kept-c.kept), trees
		a.counted, a.atMost = true, false
		return &a
	})
}

// keep notes on btrfs that erased trash may have left so many bytes which nothing promises any more: pods can share blocks between
// volumes (FICLONE), and extents that a block volume has shared stay until it has overwritten all of them. They count as foreign until what
// volumes hold is counted again.
func (f *Filesystem) keep(bytes int64) {
	f.change(func(a accounts) *accounts {
		if a.trees.Copies == 0 || !a.counted && !a.atMost {
			return nil
		}
		a.base += bytes
		a.kept += bytes
		return &a
	})
}

// CannotCount notes that it cannot be counted what others occupy, since a pool came whose volumes are not, and what the trees of the
// filesystem need. What was counted before says nothing any more.
func (l *Ledger) CannotCount(trees quota.Trees) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.on.change(func(a accounts) *accounts {
		a.trees = trees
		a.trees.Spare = 0
		if a.atMost {
			a.base = volume.Unknown
		}
		a.counted, a.atMost = false, false
		return &a
	})
}

// SetTrees notes what the trees of the filesystem need until the next count. Of the pools
// there the one that needs most decides: another may not have noticed yet that quotas were switched on.
func (l *Ledger) SetTrees(trees quota.Trees) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.on.change(func(a accounts) *accounts {
		if trees.Copies < a.trees.Copies {
			return nil
		}
		a.trees = trees
		a.trees.Spare = 0
		return &a
	})
}

// LearnForeign notes that others occupy no more than all that is taken, and exactly that
// while nothing can be the pools'. Where it is not counted what volumes hold it is not known
// otherwise, and in a shared pool not even then, for another node may have promised something.
// Nor is it while one of the pools was not read yet, or from a pool that sees less of the filesystem than another.
func (l *Ledger) LearnForeign(space dir.Space) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.on.change(func(a accounts) *accounts {
		a.of = slices.Clone(a.of)
		for i := range a.of {
			if a.of[i].ledger == l {
				a.of[i].origin.Size = space.SizeBytes
			}
		}
		if a.mayLearn(space) {
			a.base, a.counted, a.atMost = space.TakenBytes(), false, false
		}
		return &a
	})
}

// mayLearn reports whether what is taken in that space is no less than what others occupy.
func (a *accounts) mayLearn(space dir.Space) bool {
	if slices.ContainsFunc(a.of, func(one account) bool { return one.origin.Shared || one.origin.Size > space.SizeBytes }) {
		return false
	}
	owed := a.owed()
	return !owed.unread && (owed.promised == 0 && owed.pieces == 0 || space.TakenBytes() < a.foreign())
}
