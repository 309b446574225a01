package mover

import (
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// mostUnproven is how many connections may be there that have not proven yet to be the source's. Each takes up to half a MiB.
	mostUnproven = 64
	// proving is how long each of them may take, however many others there are. In 30 s, which the source waits, so many come that the
	// kernel holds no more (net.core.somaxconn).
	proving = 250 * time.Millisecond
)

// An unproven is a connection that has not proven yet to be the source's.
type unproven struct {
	net.Conn
	since  time.Time
	closed atomic.Bool
	done   chan struct{}
}

// Entrance is all of them, the oldest first.
type entrance struct {
	mu  sync.Mutex
	all []*unproven
}

// enter takes one in, and closes the oldest for it where there are too many: strangers may connect as often as they can, and say nothing.
func (e *entrance) enter(conn net.Conn) *unproven {
	if oldest := e.oldest(); oldest != nil {
		select {
		case <-oldest.done:
		case <-time.After(time.Until(oldest.since.Add(proving))):
			oldest.closed.Store(true)
			_ = oldest.Close()
			<-oldest.done
		}
	}
	u := &unproven{Conn: conn, since: time.Now(), done: make(chan struct{})}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, u)
	return u
}

// oldest is nil where there is room for another one.
func (e *entrance) oldest() *unproven {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.all) < mostUnproven {
		return nil
	}
	return e.all[0]
}

// leave lets one go that has proven itself, or has not, and says whether it was left the time to.
func (e *entrance) leave(u *unproven) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = slices.DeleteFunc(e.all, func(one *unproven) bool { return one == u })
	close(u.done)
	return !u.closed.Load()
}
