package devices

import (
	"errors"
	"fmt"
	"maps"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// A sighting says since when a device is as it is. One that another program has attached is empty and unused at first, as a disk that was
// put in: only time shows that nothing comes for it.
type sighting struct {
	as, written string
	since       time.Time
	// had: it is or was that of a volume, so that no other program has attached it. It has been unused for long as long as it is as it was then.
	had bool
}

// appearance distinguishes a device from one that has its number or its path later, and from itself with another size.
func appearance(f blockdev.Facts) string {
	instance, err := f.Instance()
	if err != nil {
		instance = "" // the kernel is older
	}
	return fmt.Sprintf("%s %s %d %d", instance, f.Alike, f.Start, f.SizeBytes)
}

// had notes that a device is that of a volume.
func (a *Agent) had(number blockdev.Number) {
	if facts, err := inspect(number); err == nil {
		a.sightings[number] = sighting{as: appearance(facts), written: facts.Written(), had: true}
	}
}

// forget forgets devices that are gone. A link to one may be missing for a moment.
func (p *pass) forget(seen map[blockdev.Number]bool) {
	maps.DeleteFunc(p.sightings, func(number blockdev.Number, _ sighting) bool {
		if seen[number] {
			return false
		}
		_, err := inspect(number)
		return err != nil
	})
}

// settles is when a device without a volume will have been unchanged for long enough; zero if it has.
func (p *pass) settles(f blockdev.Facts) time.Time {
	if p.Settle == 0 {
		return time.Time{}
	}
	as, written := appearance(f), f.Written()
	s := p.sightings[f.Number]
	now := p.Now()
	if s.as != as || s.written != written || s.had && written == "" {
		s = sighting{as: as, written: written, since: now}
		p.sightings[f.Number] = s
	}
	if at := s.since.Add(p.Settle); now.Before(at) {
		return at
	}
	return time.Time{}
}

// unsettled reports a device that is not taken yet, and when it may be. Who had it in use may be back in a moment, as a program that is
// restarted: it is looked at until it is free, and is new from then on.
func (p *pass) unsettled(found Found, facts blockdev.Facts) bool {
	j := p.jobs[found.Number]
	if j != nil && j.err == nil {
		return false
	}
	s, known := p.sightings[found.Number]
	used := known && j != nil && mayBeInUse(j.err)
	if used { // also one that was a volume's: it may have been given to something else
		s.since, s.had = p.Now(), false
		p.sightings[found.Number] = s
	}
	at := p.settles(facts)
	if at.IsZero() {
		if j != nil && reasonOf(j.err) == New {
			p.drop(found.Number)
		}
		return false
	}
	if j != nil {
		j.wanted = true
	}
	if p.report.Settles.IsZero() || at.Before(p.report.Settles) {
		p.report.Settles = at
	}
	switch {
	case used && p.Retry:
		look := p.unclaimed(found, facts)
		look.onlyLook = true
		p.follow(found.Number, look)
	case j == nil:
		p.problem("", found.Path, New, "it is new, or was just written to: %s", p.waits())
	case !errors.Is(j.err, ErrChanged):
		p.fail("", found.Path, j.err)
	}
	return true
}

func (a *Agent) waits() string {
	return fmt.Sprintf("it is offered after it was unused and unchanged for %s", a.Settle)
}

// mayBeInUse says that a device was refused because something has it, or may have it without being seen: by another path to its disk, on another
// node, or where a volume is about to be mounted.
func mayBeInUse(err error) bool {
	switch reasonOf(err) {
	case Mounted, IsSwap, InUse, HasHolders, HasLoop, Hidden, Twice, Attaching:
		return true
	}
	return false
}

// asClean refuses a device that was written to since it was found to be clean.
func (j *job) asClean() error {
	if j.held.Facts.Written() == j.clean {
		return nil
	}
	return j.refuse(New, "it was written to since it was found to be clean")
}

// same refuses a device that is not as it was when it was found to have been unchanged.
func (j *job) same(f blockdev.Facts) error {
	if j.as == "" || j.as == appearance(f) {
		return nil
	}
	return j.refuse(New, "it has just changed")
}
