package store

import (
	"sync"
	"time"
)

// How long the sign of another node of a shared pool has to be the same, as this process sees it:
const (
	// GoneAfter is when what it has published hinders no node any more that wants a volume for one
	// node. Kubernetes evicts pods from a node that does not answer after as long, and an
	// update of the driver takes less.
	GoneAfter = 5 * time.Minute
	// UnseenAfter is when a volume may be deleted that it has published, and when what it left
	// unfinished is taken over.
	UnseenAfter = 24 * time.Hour
)

// Signs are what was seen of other nodes and drivers, by name, each of which changes a sign now and then. Only for how long a sign
// has not changed counts, by the monotonic clock of this process: the clocks of two machines are never compared, and a sign that is
// seen for the first time counts as alive. The zero value has seen none, and is ready for use.
type Signs struct {
	mu   sync.Mutex
	seen map[string]sighting
}

type sighting struct {
	sign string
	at   time.Time // with the monotonic clock: see package time
}

// Unchanged notes the sign of a node or driver, and returns for how long it has been the same.
func (s *Signs) Unchanged(of, sign string) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	last, known := s.seen[of]
	if known && last.sign == sign {
		return time.Since(last.at)
	}
	if s.seen == nil {
		s.seen = make(map[string]sighting)
	}
	s.seen[of] = sighting{sign, time.Now()}
	return 0
}

// See notes the sign of a node or driver.
func (s *Signs) See(of, sign string) { s.Unchanged(of, sign) }

// Within is a function that notes the sign of a node or driver, and reports whether it has been the same for less than d.
func (s *Signs) Within(d time.Duration) func(of, sign string) bool {
	return func(of, sign string) bool { return s.Unchanged(of, sign) < d }
}
