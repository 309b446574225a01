// Package ledger keeps in memory what a pool owes and has: the promises, what is known of each
// volume, reservations of calls under way, and the trash. It guards all of that with one
// mutex. It does no I/O, writes no log, takes no other lock and calls nothing back
// while it holds the mutex, so that no caller waits for long.
package ledger

import (
	"fmt"
	"iter"
	"math"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Policy says how much of a pool may be promised.
type Policy struct {
	Pool volume.PoolName // for errors
	// Overprovision is the factor by which promises may exceed the pool's size.
	Overprovision float64
	// Reserve stays free.
	Reserve volume.Reserve
	// BytesPerInode is the pool option of that name; volume.Unknown if it is not set.
	BytesPerInode int64
}

// sellable is how much of so many bytes may be promised.
func (p Policy) sellable(bytes int64) int64 {
	all := float64(bytes) * p.Overprovision
	switch {
	case p.Overprovision == 1:
		return bytes
	case all < math.MaxInt64:
		return int64(all)
	}
	return math.MaxInt64
}

// A Ledger is that of one pool.
type Ledger struct {
	policy Policy
	// summary is made again with each change, so that reading it takes no lock that a call
	// may wait for.
	summary atomic.Pointer[Summary]
	// reap has one token once there is trash to erase.
	reap chan struct{}

	// mu guards what follows, and is never held across a system call. Where something that
	// the summary has was changed, unlock gives it back.
	mu       sync.Mutex
	on       *Filesystem // has the sums too
	sums     sums
	excesses uint64 // how often the excess was measured
	index    index
	loads    []*Load // under way, in the order in which they began
	kept     ids     // volumes that loads leave as they are known
	trash    trash
	erased   uint64 // pieces of trash
	restored uint64 // limits that were put back
}

type ids map[volume.ID]struct{}

// New makes an empty ledger, of a pool of which it is not known yet what filesystem it is on.
func New(policy Policy) *Ledger {
	l := &Ledger{policy: policy, on: &Filesystem{}, reap: make(chan struct{}, 1), index: index{option: policy.BytesPerInode, costs: usual}}
	l.sums.unread, l.sums.costs = true, usual
	l.on.enter(l, Origin{}, l.sums)
	l.mu.Lock()
	l.unlock()
	return l
}

// A Summary is what is shown of a ledger.
type Summary struct {
	Volumes   int
	Promised  int64 // bytes, those of snapshots included, without Overhead
	Snapshots SnapshotSum
	// Overhead is what is set aside besides, in bytes: for inodes that quotas do not count, for overwriting shared blocks, and for the extents
	// of block volumes.
	Overhead int64
	Trash    TrashSum
	// Held is what trash may still occupy, also that of other nodes: the sum of the promises,
	// in bytes, or volume.Unknown.
	Held int64
	// Erased is how many pieces of trash were erased, and Restored how many limits put back.
	Erased, Restored uint64

	ledger *Ledger
	on     *Filesystem
}

// Available is what can still be promised in that space, in bytes, rounded down.
func (s *Summary) Available(space dir.Space) int64 {
	return s.on.load().rounded(space, s.ledger)
}

// SharesWith are the other pools on the filesystem, in the order of their names.
func (s *Summary) SharesWith() []volume.PoolName { return s.on.load().sharing(s.ledger) }

// Summary answers at once, without a lock.
func (l *Ledger) Summary() *Summary { return l.summary.Load() }

// unlock gives the mutex back after a change.
func (l *Ledger) unlock() {
	if l.index.exceeding == 0 && l.sums.pieces == 0 {
		l.sums.excess = 0
	}
	l.on.set(l, l.sums)
	l.summary.Store(&Summary{
		Volumes:   l.index.len() - l.index.snapshots.Count,
		Snapshots: l.index.snapshots,
		Promised:  l.sums.promised - l.index.overhead,
		Overhead:  l.index.overhead,
		Trash:     l.trash.sum(),
		Held:      l.sums.held(),
		Erased:    l.erased,
		Restored:  l.restored,
		ledger:    l,
		on:        l.on,
	})
	l.mu.Unlock()
}

// sums are what a pool owes, in bytes.
type sums struct {
	// promised is the sum over all records and all creations under way, with what the volumes may take besides.
	promised int64
	// newInodes is the size for which a new volume has one such inode, in bytes; 0 for none.
	newInodes int64
	costs     Costs
	// trashed is the sum of the promises of volumes that are being removed: what they
	// still occupy is not sold again before it is free.
	trashed int64
	// pieces is how many pieces of trash there are, and unknown how many of them have an
	// unknown size.
	pieces, unknown int
	// excess is what volumes take that is in no promise, where that is not counted, as it was last measured.
	excess int64
	// others is the sum of the promises of what other nodes are removing, or volume.Unknown.
	others int64
	// unread: the pool was not read yet, so that it may owe more.
	unread bool
}

// largest is the size of the largest volume that can be made of so many bytes, a directory or a block volume.
func (s *sums) largest(left int64) int64 {
	directory, disk := left, left
	if per := s.newInodes; per > 0 {
		share := s.costs.InodeBytes + perInode
		directory = max(0, left-share) / (per + share) * per
	}
	if per := s.costs.DataPerByte; per > 0 {
		disk = max(0, left-1<<20) / (per + 1) * per
	}
	return min(directory, disk)
}

func (s *sums) add(other sums) {
	s.promised += other.promised
	s.trashed += other.trashed
	s.pieces += other.pieces
	s.unknown += other.unknown
	s.excess += other.excess
	s.unread = s.unread || other.unread
	if s.others == volume.Unknown || other.others == volume.Unknown {
		s.others = volume.Unknown
	} else {
		s.others += other.others
	}
}

// held is what trash may still occupy, or volume.Unknown.
func (s *sums) held() int64 {
	if s.unknown > 0 || s.others == volume.Unknown {
		return volume.Unknown
	}
	return s.trashed + s.others
}

func (s *sums) addTrash(promised int64) {
	s.pieces++
	if promised == volume.Unknown {
		s.unknown++
	} else {
		s.trashed += promised
	}
}

func (s *sums) dropTrash(promised int64) {
	s.pieces--
	if promised == volume.Unknown {
		s.unknown--
	} else {
		s.trashed -= promised
	}
}

// quantum is the step in which capacity is reported: about a thousandth of the pool,
// from 1 to 64 MiB. The object that carries the answer is rewritten whenever the
// number changes at all.
func quantum(size int64) int64 {
	step := int64(1) << bits.Len64(uint64(size/1000))
	return max(1<<20, min(step, 64<<20))
}

// Available is what can still be promised in that space, in bytes, rounded down.
func (l *Ledger) Available(space dir.Space) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.on.load().rounded(space, l)
}

// SetCosts notes for how many bytes of its size a new volume has an inode that no quota
// counts, 0 for none, and what the filesystem takes besides promises. That is for the volumes of the next load: it does not change while
// a pool is on its filesystem.
func (l *Ledger) SetCosts(bytesPerInode int64, costs Costs) {
	l.mu.Lock()
	defer l.unlock()
	l.sums.newInodes, l.sums.costs = bytesPerInode, costs
	if l.index.len() == 0 {
		l.index.costs = costs
	}
}

// Owed is what a volume may take of the pool, in bytes: its promise, and what its inodes, overwriting shared blocks and its extents take.
func (l *Ledger) Owed(c Info) int64 {
	return c.Promised + c.overhead(l.policy.BytesPerInode, l.costs())
}

func (l *Ledger) costs() Costs {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sums.costs
}

// InodesHold is what so many inodes of a volume take of what is set aside for them, in bytes.
func (l *Ledger) InodesHold(c Info, inodes int64) int64 {
	inodeBytes := l.costs().InodeBytes
	return max(0, min(inodes*inodeBytes, c.ofInodes(l.policy.BytesPerInode, inodeBytes)))
}

// SetOthersTrash notes what the trash of other nodes in the pool may still occupy, in bytes, or
// volume.Unknown.
func (l *Ledger) SetOthersTrash(held int64) {
	l.mu.Lock()
	defer l.unlock()
	l.sums.others = held
}

// Unread reports whether the pool was not read yet, so that it may owe more than is known.
func (l *Ledger) Unread() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sums.unread
}

// Restored counts a limit that was put back.
func (l *Ledger) Restored() {
	l.mu.Lock()
	defer l.unlock()
	l.restored++
}

// Note brings the ledger in line with what is on disk of a volume.
func (l *Ledger) Note(id volume.ID, c Info) {
	l.mu.Lock()
	defer l.unlock()
	l.put(id, c)
}

// put also informs the loads under way, even where nothing changes: they may have read a
// record that was there for a moment.
func (l *Ledger) put(id volume.ID, c Info) {
	l.sums.promised += l.index.put(id, c)
	for _, load := range l.loads {
		load.noted[id] = struct{}{}
	}
}

// Known is what is known of a volume; the zero Info if there is none.
func (l *Ledger) Known(id volume.ID) Info {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.index.get(id)
}

// Volumes is After without the snapshots, which follow all volumes.
func (l *Ledger) Volumes(id volume.ID, most int) []Volume {
	all := l.After(id, most)
	first := slices.IndexFunc(all, func(v Volume) bool { return v.ID.IsSnapshot() })
	if first < 0 {
		return all
	}
	return all[:first]
}

// After is up to most volumes and snapshots that follow an id; the zero id comes before all.
func (l *Ledger) After(id volume.ID, most int) []Volume {
	var all []Volume
	for most > len(all) {
		some := l.after(id, most-len(all))
		if len(some) == 0 {
			break
		}
		all = append(all, some...)
		id = some[len(some)-1].ID
	}
	return all
}

func (l *Ledger) after(id volume.ID, most int) []Volume {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.index.after(id, most)
}

// Each goes over the volumes that are asked for, in the order of their ids. No lock is
// held while the caller works on one, or chooses, and of a large pool only a few are
// remembered. What is known of one is as it is when its turn comes.
func (l *Ledger) Each(which func(Info) bool) iter.Seq2[volume.ID, Info] {
	return l.EachAfter(volume.ID{}, which)
}

// EachAfter is Each of those that follow an id.
func (l *Ledger) EachAfter(last volume.ID, which func(Info) bool) iter.Seq2[volume.ID, Info] {
	return func(yield func(volume.ID, Info) bool) {
		last := last
		for some := l.after(last, chunk); len(some) > 0; some = l.after(last, chunk) {
			for _, v := range some {
				if !which(v.Info) {
					continue
				}
				if c := l.Known(v.ID); which(c) && !yield(v.ID, c) {
					return
				}
			}
			last = some[len(some)-1].ID
		}
	}
}

// Any reports whether there is a volume that is asked for.
func (l *Ledger) Any(which func(Info) bool) bool {
	for range l.Each(which) {
		return true
	}
	return false
}

// A Reservation is bytes set aside for what a call is making. Whatever becomes of the call, it
// is released in the end: also by a panic, which ends no more than the call.
type Reservation struct {
	ledger  *Ledger
	bytes   int64
	settled bool
}

// Reserve sets bytes aside, if they fit: the check and the reservation are one step. They are
// held until Commit or Release. Errors: volume.ErrNoSpace, volume.ErrUnavailable while another pool
// on the filesystem is not read.
func (l *Ledger) Reserve(space dir.Space, bytes int64) (*Reservation, error) {
	l.mu.Lock()
	defer l.unlock()
	if space.OutOfInodes() {
		return nil, fmt.Errorf("%w: the filesystem of pool %q has no inode left", volume.ErrNoSpace, l.policy.Pool)
	}
	if err := l.reserve(space, bytes); err != nil {
		return nil, err
	}
	return &Reservation{ledger: l, bytes: bytes}, nil
}

// reserve checks and changes the accounts of all pools on the filesystem in one step.
func (l *Ledger) reserve(space dir.Space, bytes int64) (err error) {
	owed := l.sums
	owed.promised += bytes
	l.on.change(func(a accounts) *accounts {
		if others := a.awaited(l); len(others) > 0 {
			err = fmt.Errorf("%w: the promises of the pools %q on the same filesystem are not known", volume.ErrUnavailable, others)
			return nil
		}
		available := a.available(space, l.policy)
		if bytes <= available {
			err = nil
			return a.with(l, owed)
		}
		err = fmt.Errorf("%w: pool %q has %d bytes to promise, %d are asked for", volume.ErrNoSpace, l.policy.Pool, available, bytes)
		if others := a.sharing(l); len(others) > 0 {
			err = fmt.Errorf("%w; it shares its filesystem with %q", err, others)
		}
		return nil
	})
	if err == nil {
		l.sums = owed
	}
	return err
}

// Held reports whether the bytes are still held. Only the call that made the reservation asks.
func (r *Reservation) Held() bool { return !r.settled }

// Release gives the bytes back, if they are still held.
func (r *Reservation) Release() {
	r.ledger.mu.Lock()
	defer r.ledger.unlock()
	r.settle()
}

// Commit turns the bytes into the promise of a volume.
func (r *Reservation) Commit(id volume.ID, c Info) {
	r.ledger.mu.Lock()
	defer r.ledger.unlock()
	r.ledger.put(id, c)
	r.settle()
}

func (r *Reservation) settle() {
	if !r.settled {
		r.settled = true
		r.ledger.sums.promised -= r.bytes
	}
}
