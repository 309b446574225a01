// Package keylock locks keys: with Locks nobody waits, with Turns everybody does. The mutexes inside are
// held for a few instructions, and nothing is taken under them.
package keylock

import (
	"context"
	"fmt"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Locks holds one lock for each key that is in use. A call never waits for
// another on the same key: its caller has to try again. Calls on different keys do
// not meet. The zero value is ready for use.
type Locks[K comparable] struct {
	mu   sync.Mutex
	held map[K]int // how many share the key, or exclusive
}

const exclusive = -1

// TryLock takes the lock of a key, or returns ErrBusy at once.
func (l *Locks[K]) TryLock(key K) (unlock func(), err error) {
	return l.change(key, func(now int) (int, bool) { return exclusive, now == 0 }, func(int) int { return 0 })
}

// TryShare takes the lock of a key together with others who share it, or returns ErrBusy at once.
func (l *Locks[K]) TryShare(key K) (unlock func(), err error) {
	return l.change(key, func(now int) (int, bool) { return now + 1, now >= 0 }, func(now int) int { return now - 1 })
}

// TryAlone makes the lock that the caller shares one that nobody else has, or returns ErrBusy
// if others share it. Until done is called nobody can join.
func (l *Locks[K]) TryAlone(key K) (done func(), err error) {
	return l.change(key, func(now int) (int, bool) { return exclusive, now == 1 }, func(int) int { return 1 })
}

// change replaces the state of a key unless that is refused, and returns what replaces it again.
func (l *Locks[K]) change(key K, to func(now int) (int, bool), back func(now int) int) (undo func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	next, ok := to(l.held[key])
	if !ok {
		return nil, fmt.Errorf("%w on %v", volume.ErrBusy, key)
	}
	l.set(key, next)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.set(key, back(l.held[key]))
	}, nil
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
