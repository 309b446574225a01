package serve

import (
	"context"
	"fmt"
	"sync"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Locks holds one lock for each key that is in use. A call never waits for
// another on the same key: its caller has to try again. Calls and checks wait for a check in the background,
// which their callers know nothing of. Calls on different keys do not meet. The zero value is ready for use.
type Locks[K comparable] struct {
	mu     sync.Mutex
	held   map[K]int           // how many share the key, or exclusive
	checks map[K]chan struct{} // of those that a check holds; closed at its end
}

const exclusive = -1

// longestCheck is how long a call or a check waits for a check. What takes longer hangs.
const longestCheck = 10 * time.Second

// TryLock takes the lock of a key, or returns ErrBusy at once. Errors: volume.ErrUnavailable for a check that does not end.
func (l *Locks[K]) TryLock(key K) (unlock func(), err error) { return l.lock(key, nil) }

// TryCheck is TryLock for a check in the background, and what else holds the lock for an instant and takes no other meanwhile: calls and
// other checks wait for its end instead of returning ErrBusy.
func (l *Locks[K]) TryCheck(key K) (unlock func(), err error) {
	return l.lock(key, make(chan struct{}))
}

func (l *Locks[K]) lock(key K, check chan struct{}) (unlock func(), err error) {
	return l.change(key, func(now int) (int, bool) { return exclusive, now == 0 }, func(int) int { return 0 }, check)
}

// TryShare takes the lock of a key together with others who share it, or returns ErrBusy at once. Errors: as TryLock.
func (l *Locks[K]) TryShare(key K) (unlock func(), err error) {
	return l.change(key, func(now int) (int, bool) { return now + 1, now >= 0 }, func(now int) int { return now - 1 }, nil)
}

// TryAlone makes the lock that the caller shares one that no other call has, or returns ErrBusy
// if others share it. Until done is called no other can join.
func (l *Locks[K]) TryAlone(key K) (done func(), err error) {
	return l.change(key, func(now int) (int, bool) { return exclusive, now == 1 }, func(int) int { return 1 }, nil)
}

func busy(key any) error { return fmt.Errorf("%w on %v", volume.ErrBusy, key) }

// change replaces the state of a key unless that is refused, and returns what replaces it again. A check is closed then; it is nil for a call.
func (l *Locks[K]) change(key K, to func(now int) (int, bool), back func(now int) int, check chan struct{}) (undo func(), err error) {
	for {
		changed, other := l.try(key, to, check)
		switch {
		case changed:
			return func() { l.undo(key, back, check) }, nil
		case other == nil:
			return nil, busy(key)
		}
		if err := await(other, key); err != nil {
			return nil, err
		}
	}
}

// try changes the state of a key, or returns the check that keeps it from that.
func (l *Locks[K]) try(key K, to func(now int) (int, bool), check chan struct{}) (changed bool, other <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	next, ok := to(l.held[key])
	if !ok {
		return false, l.checks[key]
	}
	l.set(key, next)
	if check != nil {
		if l.checks == nil {
			l.checks = make(map[K]chan struct{})
		}
		l.checks[key] = check
	}
	return true, nil
}

func (l *Locks[K]) undo(key K, back func(now int) int, check chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.set(key, back(l.held[key]))
	if check != nil {
		delete(l.checks, key)
		close(check)
	}
}

func await(check <-chan struct{}, key any) error {
	patience := time.NewTimer(longestCheck)
	defer patience.Stop()
	select {
	case <-check:
		return nil
	case <-patience.C:
		return fmt.Errorf("%w: a check of %v in the background does not end: its filesystem may hang", volume.ErrUnavailable, key)
	}
}

func (l *Locks[K]) set(key K, to int) {
	if l.held == nil {
		l.held = make(map[K]int)
	}
	if l.held[key] = to; to == 0 {
		delete(l.held, key)
	}
}

// Turns has those who work on the same key wait for each other. The zero value is ready for use.
type Turns[K comparable] struct {
	mu   sync.Mutex
	held map[K]chan struct{} // closed at the end of the turn
}

// Wait waits for a turn until ctx ends. The error is the cause of that.
func (t *Turns[K]) Wait(ctx context.Context, key K) (done func(), err error) {
	for {
		ended, mine := t.take(key)
		if mine {
			return func() { t.end(key) }, nil
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (t *Turns[K]) take(key K) (ended <-chan struct{}, mine bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if ended, busy := t.held[key]; busy {
		return ended, false
	}
	if t.held == nil {
		t.held = make(map[K]chan struct{})
	}
	t.held[key] = make(chan struct{})
	return nil, true
}

func (t *Turns[K]) end(key K) {
	t.mu.Lock()
	defer t.mu.Unlock()
	close(t.held[key])
	delete(t.held, key)
}

// Pins has the volumes and snapshots that are being copied. They are taken and checked under
// the lock of their id, so that a call that has that and finds none knows that none comes. The
// zero value is ready for use.
type Pins struct {
	mu   sync.Mutex
	held map[pin]int
	used map[volume.ID]bool // published while they are copied
}

type pin struct {
	id        volume.ID
	exclusive bool
}

// Pin keeps an entry from being deleted, and the file of a block volume from growing. An exclusive one keeps it from being published,
// too, other than as a directory that can only be read.
func (p *Pins) Pin(id volume.ID, exclusive bool) (unpin func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held == nil {
		p.held = make(map[pin]int)
	}
	one := pin{id, exclusive}
	p.held[one]++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.held[one]--; p.held[one] == 0 {
			delete(p.held, one)
			if !exclusive {
				delete(p.used, id)
			}
		}
	}
}

// Free returns ErrBusy for an entry that is being copied.
func (p *Pins) Free(id volume.ID) error { return p.free(pin{id, false}, pin{id, true}) }

// MayBeWritten is called before a volume is published. It returns ErrBusy for one that is being copied in a way that no pod may write
// to it meanwhile, and notes of others that they were, also if they are not any more when they are copied.
func (p *Pins) MayBeWritten(id volume.ID) error {
	if err := p.free(pin{id, true}); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held[pin{id, false}] > 0 {
		if p.used == nil {
			p.used = make(map[volume.ID]bool)
		}
		p.used[id] = true
	}
	return nil
}

// Used reports whether a volume that the caller has pinned may have been published since.
func (p *Pins) Used(id volume.ID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used[id]
}

func (p *Pins) free(of ...pin) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range of {
		if p.held[one] > 0 {
			return fmt.Errorf("%w: a snapshot or a volume is being made from %s", volume.ErrBusy, one.id.Named())
		}
	}
	return nil
}
