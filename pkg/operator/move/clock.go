package move

import (
	"net/http"
	"sync/atomic"
	"time"
)

// A Clock is that of the API server, by the dates of its answers: pods have their times by it, and the operator's may be another.
type Clock struct{ ahead atomic.Int64 }

// exact is how far the Clock may be off: dates have no fractions of a second, and answers take a while.
const exact = 3 * time.Second

// Now is the time.
func (c *Clock) Now() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) }

// Wrap reads the dates of all answers that come by a transport.
func (c *Clock) Wrap(transport http.RoundTripper) http.RoundTripper { return reading{transport, c} }

type reading struct {
	http.RoundTripper
	clock *Clock
}

// RoundTrip makes a request.
func (r reading) RoundTrip(request *http.Request) (*http.Response, error) {
	answer, err := r.RoundTripper.RoundTrip(request)
	if err == nil {
		r.clock.read(answer.Header.Get("Date"))
	}
	return answer, err
}

// read takes a date over if the clock is off by it: otherwise it would go back and forth.
func (c *Clock) read(date string) {
	at, err := http.ParseTime(date)
	if err != nil {
		return
	}
	ahead := time.Until(at)
	if off := ahead - time.Duration(c.ahead.Load()); off < -exact || off > exact {
		c.ahead.Store(int64(ahead))
	}
}
