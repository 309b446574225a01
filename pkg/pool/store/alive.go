package store

import (
	"sync"
	"time"
)

// UnseenAfter is how long the sign of another node of a shared pool has to be the same, as this process sees it, until what that left
// unfinished is taken over. What it has published stays so: the sign is that of its driver, and pods run on without one.
const UnseenAfter = 24 * time.Hour

// watchGap is the longest time between two looks in which another could have been seen: twice their period. In a longer one this
// driver could not look, and neither could the others show anything, as while their server was away.
const watchGap = 20 * time.Second

// Signs are what was seen of other nodes and drivers, by name, each of which changes a sign now and then. Only for how long a sign
// has not changed counts, by the monotonic clock of this process, and of that only what it has watched: see Look. The clocks of two
// machines are never compared, and a sign that is seen for the first time counts as alive. The zero value has seen none, and is
// ready for use.
type Signs struct {
	mu   sync.Mutex
	seen map[string]sighting

	watched time.Duration // in all: the clock by which signs age
	looked  time.Time     // last, with the monotonic clock: see package time
	able    bool          // then
}

type sighting struct {
	sign string
	at   time.Duration // by Signs.watched
}

// Look is called with each look at all signs. Able says that it saw them, and that this driver has written a sign of its own, or
// could have: where it cannot, the others may not either. Signs age by the time between two such looks, if that is short.
func (s *Signs) Look(able bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if able {
		s.watched += s.unwatched()
	}
	s.looked, s.able = time.Now(), able
}

// unwatched is what the next look adds if it sees the signs.
func (s *Signs) unwatched() time.Duration {
	if since := time.Since(s.looked); s.able && since <= watchGap {
		return since
	}
	return 0
}

// Unchanged notes the sign of a node or driver, and returns for how long it was watched to be the same, up to the last look.
func (s *Signs) Unchanged(of, sign string) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	last, known := s.seen[of]
	if known && last.sign == sign {
		return max(0, s.watched-last.at)
	}
	if s.seen == nil {
		s.seen = make(map[string]sighting)
	}
	s.seen[of] = sighting{sign, s.watched + s.unwatched()}
	return 0
}

// See notes the sign of a node or driver.
func (s *Signs) See(of, sign string) { s.Unchanged(of, sign) }

// Within is a function that notes the sign of a node or driver, and reports whether it has been the same for less than d.
func (s *Signs) Within(d time.Duration) func(of, sign string) bool {
	return func(of, sign string) bool { return s.Unchanged(of, sign) < d }
}
