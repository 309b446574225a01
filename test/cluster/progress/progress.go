// Package progress waits, and prints what it waits for.
package progress

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"
)

// A Log prints lines with the time since it was made.
type Log struct {
	mu    sync.Mutex
	to    io.Writer
	start time.Time
	// slower is how many times the usual everything may take.
	slower int
}

// New returns a log that prints to a writer.
func New(to io.Writer) *Log { return &Log{to: to, start: time.Now(), slower: 1} }

// Slower lets everything take so many times as long, and returns the log.
func (l *Log) Slower(times int) *Log {
	l.slower = max(times, 1)
	return l
}

// Limit is how long something may take for which this is enough usually.
func (l *Log) Limit(usual time.Duration) time.Duration { return usual * time.Duration(l.slower) }

// Printf prints a line.
func (l *Log) Printf(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.to, "%7.1fs  %s\n", time.Since(l.start).Seconds(), fmt.Sprintf(format, args...))
}

// between is how long to wait before checking again.
const between = 100 * time.Millisecond

// Until checks again and again until there is nothing left to wait for. A check
// says what there is, or "" when it is over; an error ends the wait, and comes
// with what was seen before it. What is waited for is printed when it is seen
// first and whenever it has changed, but not more often than once in five
// seconds. When the time is up, the allowed one or with Slower a multiple of it,
// the error says what was seen last.
func (l *Log) Until(ctx context.Context, allowed time.Duration, what string, check func(context.Context) (string, error)) error {
	ctx, cancel := context.WithTimeout(ctx, l.Limit(allowed))
	defer cancel()
	tick := time.NewTicker(between)
	defer tick.Stop()
	printed, last, start := "", "", time.Now()
	nextPrint := start.Add(time.Second)
	for {
		state, err := check(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			if last != "" {
				return fmt.Errorf("%s: %w; before: %s", what, err, last)
			}
			return fmt.Errorf("%s: %w", what, err)
		case err == nil && state == "":
			return nil
		case err == nil:
			last = state
		}
		if now := time.Now(); last != printed && now.After(nextPrint) {
			l.Printf("  %s: %s", what, last)
			printed, nextPrint = last, now.Add(5*time.Second)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%s: not after %.0f s: %s", what, time.Since(start).Seconds(), last)
		}
	}
}
