package ledger

import (
	"fmt"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

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
