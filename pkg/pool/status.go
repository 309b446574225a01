package pool

import (
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Status is what is shown of a pool to people and monitoring.
type Status struct {
	Name Name
	// Err is why the pool does not serve; nil if it does.
	Err        error
	SystemDisk bool
	// Enforced: the kernel keeps the sizes of new volumes.
	Enforced bool
	// Restored is how often a limit was found missing or different, and put back.
	Restored uint64
	Volumes  int
	Promised int64 // bytes
	// Space is that of the pool's filesystem at the last look; nil if the pool does not
	// serve. Available is what Capacity answers with that.
	Space     *dir.Space
	Available int64 // bytes
	// Errors is how many its filesystem has counted, before this start too, or NotKnown.
	Errors int64
	// Used is what the volumes hold, in bytes, or NotKnown: without quotas, in a shared pool,
	// and where a volume has no limit. It is counted once a minute.
	Used int64
	// Unlimited is how many volumes nothing but the end of the disk stops, and Untaken what
	// the others may still take of what they were promised, in bytes. Both are counted once a
	// minute, and NotKnown before that and while the pool does not serve.
	Unlimited int
	Untaken   int64
	// Trash is how many removed volumes still occupy space, and Stuck how many of
	// them could not be removed.
	Trash, Stuck int
	// TrashBytes is what they hold, or NotKnown: without quotas.
	TrashBytes int64
	// TrashSince is when the oldest of those that are not stuck was removed, or found at the
	// start of the driver; the zero time if there are none.
	TrashSince time.Time
	// RemovedFiles is how many files and directories the reaper took on, and RemovedVolumes
	// how many pieces of trash it has erased.
	RemovedFiles, RemovedVolumes uint64
	// Abnormal is how many volumes have an abnormal condition, by all reasons that there
	// are; nil while that is not known.
	Abnormal map[health.Reason]int
	// LastError is when the pool did not serve, or work in the background failed; the
	// zero time if that was never so.
	LastError time.Time
}

// shown is what of a pool changes with calls. It is made anew with each change, so that
// looking at it takes no lock that a call may wait for.
type shown struct {
	volumes  int
	ledger   ledger
	restored uint64
	trash    trashSum
}

// unlock gives the mutex back after a change.
func (p *Pool) unlock() {
	p.shown.Store(&shown{
		volumes:  p.index.len(),
		ledger:   p.ledger,
		restored: p.restored,
		trash:    p.trash.sum(),
	})
	p.mu.Unlock()
}

// noteError has monitoring know that something of the pool failed just now.
func (p *Pool) noteError() {
	now := time.Now()
	p.lastError.Store(&now)
}

// Status answers from memory, and takes no lock.
func (p *Pool) Status() Status {
	st, now := p.state.Load(), p.shown.Load()
	status := Status{
		Name:           p.config.Name,
		Err:            st.err,
		SystemDisk:     st.systemDisk,
		Enforced:       p.enforcing(),
		Restored:       now.restored,
		Volumes:        now.volumes,
		Promised:       now.ledger.promised,
		Space:          st.space,
		Errors:         st.errors,
		Used:           NotKnown,
		Unlimited:      NotKnown,
		Untaken:        NotKnown,
		Trash:          now.trash.pieces,
		Stuck:          now.trash.stuck,
		TrashBytes:     now.trash.holds,
		TrashSince:     now.trash.since,
		RemovedFiles:   p.erased.files.Load(),
		RemovedVolumes: p.erased.pieces.Load(),
	}
	if st.space != nil {
		status.Available = now.ledger.told(*st.space, p.config)
		status.Used = p.used.Load()
	}
	if last := p.surveyed.Load(); last != nil && st.err == nil {
		status.Unlimited, status.Untaken = last.unlimited, last.untaken
	}
	status.Abnormal = p.abnormal(st, now)
	if failed := p.lastError.Load(); failed != nil {
		status.LastError = *failed
	}
	return status
}

// abnormal is how many volumes are so by the last survey, or all of them where the pool does
// not serve.
func (p *Pool) abnormal(st *state, now *shown) map[health.Reason]int {
	last := p.surveyed.Load()
	if st.err == nil && last == nil {
		return nil
	}
	abnormal := make(map[health.Reason]int)
	for _, reason := range health.Reasons() {
		if st.err == nil {
			abnormal[reason] = last.abnormal[reason]
		} else {
			abnormal[reason] = 0
		}
	}
	if st.err != nil {
		abnormal[health.PoolNotServing] = now.volumes
	}
	return abnormal
}
