package localpv

import (
	"slices"
	"strings"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
)

// firstRetry is after what time a refused device is checked again at first: a device is often in
// use only until its unmount has ended.
const firstRetry = 2 * time.Second

// A retry says when devices that were refused are checked again: soon, then each time after twice as
// long, and no less often than devices are polled. What is refused anew begins again. The zero
// value is for nothing refused.
type retry struct {
	refused string
	after   time.Duration
	at      time.Time
}

func (r *retry) due(now time.Time) bool { return r.refused != "" && !now.Before(r.at) }

// next takes what is refused now, and returns when to come back at the latest.
func (r *retry) next(problems []devices.Problem, now, poll time.Time) time.Time {
	var all []string
	for _, p := range problems {
		if p.Reason == devices.New { // the report says when
			continue
		}
		all = append(all, p.Path+" "+p.Volume+" "+string(p.Reason))
	}
	slices.Sort(all)
	refused := strings.Join(all, "\n")
	switch {
	case refused == "":
		*r = retry{}
		return poll
	case refused != r.refused:
		*r = retry{refused: refused, after: firstRetry, at: now.Add(firstRetry)}
	case r.due(now):
		r.after *= 2
		r.at = now.Add(r.after)
	}
	if r.at.After(poll) {
		return poll
	}
	return r.at
}
