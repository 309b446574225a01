package localpv

import (
	"maps"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
)

const (
	// firstRetry is after what time a refused device is checked again at first: a device is often in
	// use only until its unmount has ended.
	firstRetry = 2 * time.Second
	// refusedAnew is after what time without a refusal it is a new one.
	refusedAnew = time.Minute
)

// A retry says when devices that were refused are checked again: soon, then each time after twice as
// long, and no less often than devices are polled. What is refused anew begins again, and not what is refused
// for one reason and another in turns: each check may list all volumes. The zero value is for nothing refused.
type retry struct {
	refused map[string]time.Time // the last time
	after   time.Duration
	at      time.Time // zero while nothing is refused
}

func (r *retry) due(now time.Time) bool { return !r.at.IsZero() && !now.Before(r.at) }

// next takes what is refused now, and whether the API server has refused anything, and returns when to come back at the latest.
func (r *retry) next(problems []devices.Problem, failed bool, now, poll time.Time) time.Time {
	refused := make(map[string]time.Time)
	for _, p := range problems {
		if p.Reason != devices.New { // the report says when
			refused[p.Path+" "+p.Volume+" "+string(p.Reason)] = now
		}
	}
	if failed {
		refused["the API server"] = now
	}
	anew := false
	for what := range refused {
		last, known := r.refused[what]
		anew = anew || !known || now.Sub(last) > max(refusedAnew, r.after)
	}
	earlier := r.refused
	r.refused = maps.Clone(refused)
	for what, last := range earlier {
		if _, still := refused[what]; !still && now.Sub(last) <= refusedAnew {
			r.refused[what] = last
		}
	}
	switch {
	case len(refused) == 0:
		r.at = time.Time{}
		return poll
	case anew:
		r.after, r.at = firstRetry, now.Add(firstRetry)
	case r.at.IsZero():
		r.at = now.Add(r.after)
	case r.due(now):
		r.after *= 2
		r.at = now.Add(r.after)
	}
	if r.at.After(poll) {
		return poll
	}
	return r.at
}
