package pool

import (
	"fmt"
	"sync"
)

// Locks holds one lock for each key that is in use. A call never waits for
// another on the same key: it is told to try again. Calls on different keys do
// not meet. The zero value is ready for use.
type Locks[K comparable] struct {
	mu   sync.Mutex
	held map[K]struct{}
}

// TryLock takes the lock of a key, or answers ErrBusy at once.
func (l *Locks[K]) TryLock(key K) (unlock func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, busy := l.held[key]; busy {
		return nil, fmt.Errorf("%w on %v", ErrBusy, key)
	}
	if l.held == nil {
		l.held = make(map[K]struct{})
	}
	l.held[key] = struct{}{}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.held, key)
	}, nil
}
