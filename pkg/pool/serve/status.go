package serve

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Status is what is shown of a pool to people and monitoring.
type Status struct {
	Name volume.PoolName
	// Err is why the pool does not serve; nil if it does.
	Err        error
	SystemDisk bool
	// SharesWith are the other pools of this node on the pool's filesystem, in the order of
	// their names.
	SharesWith []volume.PoolName
	// Enforced: the kernel enforces the sizes of new volumes.
	Enforced bool
	// Restored is how often a limit was found missing or different, and put back.
	Restored uint64
	Volumes  int
	Promised int64 // bytes
	// Snapshots are those of this driver; lost are also those that the last survey found
	// so.
	Snapshots ledger.SnapshotSum
	Copies    Copies
	// Space is that of the pool's filesystem at the last check; nil if the pool does not
	// serve. Available is what Capacity returns with that.
	Space     *dir.Space
	Available int64 // bytes
	// Errors is how many its filesystem has counted, before this start too, or volume.Unknown.
	Errors  int64
	Counted Counted
	// Trash are the removed volumes that still occupy space; its oldest piece was removed, or found at the start of the driver, at that time.
	Trash  ledger.TrashSum
	Erased Erased
	// Conditions are what is wrong with the pool as a whole; nil for nothing.
	Conditions []health.Condition
	// Abnormal is how many volumes have an abnormal condition, by all reasons that there
	// are; nil while that is not known.
	Abnormal map[health.Reason]int
	// LastError is when the pool did not serve, or work in the background failed; the
	// zero time if that was never so.
	LastError time.Time
}

// Copies are the snapshots of this driver, and the volumes from a source: those that are being made, and those that were made or failed.
type Copies struct {
	Running int
	Done    map[volume.CopyMethod]CopySum
}

// copies counts the snapshots, restores and clones of a pool since the driver has started. The
// zero value is ready for use.
type copies struct {
	mu      sync.Mutex
	running int
	done    map[volume.CopyMethod]CopySum
}

// A CopySum is how many copies were made by a method, how long that took, and for how long those
// who write to their sources had to wait at most. Of those that Failed there is only the number.
type CopySum struct {
	Count, Failed uint64
	Took, Stalled time.Duration
}

// begin counts a copy that begins.
func (c *copies) begin(method volume.CopyMethod) (end func(stalled time.Duration, err error)) {
	began := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running++
	return func(stalled time.Duration, err error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.running--
		if c.done == nil {
			c.done = make(map[volume.CopyMethod]CopySum)
		}
		sum := c.done[method]
		if err != nil {
			sum.Failed++
		} else {
			sum.Count++
			sum.Took += time.Since(began)
			sum.Stalled += stalled
		}
		c.done[method] = sum
	}
}

func (c *copies) counted() (running int, done map[volume.CopyMethod]CopySum) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.running, maps.Clone(c.done)
}

// CountCopy counts a copy that begins.
func (p *Pool) CountCopy(method volume.CopyMethod) (end func(stalled time.Duration, err error)) {
	return p.copies.begin(method)
}

// Counted is what is counted once a minute, each volume.Unknown before that.
type Counted struct {
	// Used is what the volumes hold of their promises, in bytes, or volume.Unknown: without quotas, in a shared pool,
	// and where a volume has no limit.
	Used int64
	// Unlimited is how many volumes no limit keeps from filling the disk, and Unused what
	// the others may still take of what they were promised, in bytes. Both are volume.Unknown while the pool does not serve.
	Unlimited int
	Unused    int64
	// Upstream is how many snapshots of the upstream KubeVirt driver the snapshotPath seems to have, or volume.Unknown: without one
	// in the pool, and while it cannot be read.
	Upstream int
}

// Erased is what the reaper has done: how many files and directories it took on, and how many pieces of trash it has erased.
type Erased struct{ Files, Volumes uint64 }

// problems are those of a pool that monitoring reads. It takes no lock.
type problems struct {
	log  logr.Logger
	last atomic.Pointer[time.Time]
	// leftovers are those that stay, with why, by path.
	leftovers sync.Map
}

// note has monitoring report that something of the pool failed just now.
func (b *problems) note() {
	now := time.Now()
	b.last.Store(&now)
}

// failed logs what could not be done in the background, and has monitoring report it.
func (b *problems) failed(err error, what string, about ...any) {
	b.note()
	b.log.Error(err, what, about...)
}

// left is failed for a leftover that stays, which is logged once as long as it stays for the same reason.
func (b *problems) left(path string, err error) {
	if err == nil {
		b.leftovers.Delete(path)
		return
	}
	b.note()
	if last, _ := b.leftovers.Swap(path, err.Error()); last != err.Error() {
		b.log.Error(err, "Failed to clear a leftover; it is kept, and the pool serves all else", "path", path)
	}
}

// Status answers from memory, and takes no lock that a call waits for.
func (p *Pool) Status() Status {
	st, now := p.state.Load(), p.Ledger.Summary()
	status := Status{
		Name:       p.Config.Name,
		Err:        st.err,
		SystemDisk: st.systemDisk,
		Enforced:   p.enforcing(),
		Restored:   now.Restored,
		Volumes:    now.Volumes,
		Promised:   now.Promised,
		Snapshots:  now.Snapshots,
		Space:      st.space,
		SharesWith: now.SharesWith(),
		Errors:     st.errors,
		Counted:    Counted{Used: volume.Unknown, Unlimited: volume.Unknown, Unused: volume.Unknown, Upstream: volume.Unknown},
		Trash:      now.Trash,
		Erased:     Erased{Files: p.reaper.files.Load(), Volumes: now.Erased},
	}
	status.Copies.Running, status.Copies.Done = p.copies.counted()
	if st.space != nil {
		status.Available = now.Available(*st.space)
		status.Counted.Used = p.usage.bytes.Load()
	}
	if last := p.surveys.last.Load(); last != nil && st.err == nil {
		status.Counted.Unlimited, status.Counted.Unused = last.Unlimited, last.Unused
		status.Counted.Upstream = last.Upstream
		status.Snapshots.Lost = max(status.Snapshots.Lost, last.LostSnapshots)
	}
	status.Conditions = st.conditions()
	status.Abnormal = p.surveys.abnormal(st, now)
	if failed := p.problems.last.Load(); failed != nil {
		status.LastError = *failed
	}
	return status
}

// conditions are what is wrong with a pool, as inspect has them.
func (s *state) conditions() []health.Condition {
	if s.space == nil {
		return health.Facts{Pool: s.err}.Conditions()
	}
	return health.OfPool(s.err, *s.space, s.errors).Conditions()
}

// reason is why a pool does not serve.
func (s *state) reason() health.Reason { return health.Facts{Pool: s.err}.Condition().Reason }

// abnormal is how many volumes are so by the last survey, or all of them where the pool does not serve.
func (s *surveys) abnormal(st *state, now *ledger.Summary) map[health.Reason]int {
	last := s.last.Load()
	if st.err == nil && last == nil {
		return nil
	}
	abnormal := make(map[health.Reason]int)
	for _, reason := range health.Reasons() {
		abnormal[reason] = 0
	}
	if st.err != nil {
		abnormal[st.reason()] = now.Volumes
	} else {
		maps.Copy(abnormal, last.Abnormal)
	}
	return abnormal
}

// Free is the capacity of the pool in bytes, rounded down, and whether it serves.
func (p *Pool) Free(ctx context.Context) (bytes int64, serves bool) {
	s, err := p.Enter(ctx)
	if err != nil {
		return 0, false
	}
	defer s.Close()
	if err := s.View().Index().LoadShared(); err != nil {
		return 0, false
	}
	space, err := s.Store.Space()
	if err != nil {
		return 0, false
	}
	if slices.ContainsFunc(p.Node.Pools, p.awaits) {
		return 0, true
	}
	return p.Ledger.Available(space), true
}
