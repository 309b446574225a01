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
// held until Commit or Release. Errors: volume.ErrNoSpace.
func (l *Ledger) Reserve(space dir.Space, bytes int64) (*Reservation, error) {
	l.mu.Lock()
	defer l.unlock()
	if space.OutOfInodes() {
		return nil, fmt.Errorf("%w: the filesystem of pool %q has no inode left", volume.ErrNoSpace, l.policy.Pool)
	}
	if available := l.sums.available(space, l.policy); bytes > available {
		return nil, fmt.Errorf("%w: pool %q has %d bytes to promise, %d are asked for", volume.ErrNoSpace, l.policy.Pool, available, bytes)
	}
	l.sums.promised += bytes
	return &Reservation{ledger: l, bytes: bytes}, nil
}

// Release gives the bytes back, and reports whether they were still held.
func (r *Reservation) Release() bool {
	r.ledger.mu.Lock()
	defer r.ledger.unlock()
	return r.settle()
}

// Commit turns the bytes into the promise on a volume's card.
func (r *Reservation) Commit(id volume.ID, c Card) {
	r.ledger.mu.Lock()
	defer r.ledger.unlock()
	r.ledger.put(id, c)
	r.settle()
}

func (r *Reservation) settle() bool {
	if r.settled {
		return false
	}
	r.settled = true
	r.ledger.sums.promised -= r.bytes
	return true
}
