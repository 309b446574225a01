package migrate

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPlan(t *testing.T) {
	before := seen{claim: plain, bound: true, volume: plain, policy: true, directory: plain}
	migrated := seen{saved: true, finished: true, claim: csi, bound: true, volume: csi, policy: true, directory: csi, recorded: true}
	with := func(s seen, change func(*seen)) seen { change(&s); return s }
	tests := map[string]struct {
		want  form
		seen  seen
		steps []step
		err   error
	}{
		"from the beginning": {csi, before, []step{save, retain, deleteClaim, awaitClaimGone, deleteVolume, awaitVolumeGone,
			move, record, awaitReport, createVolume, createClaim, awaitBound, restorePolicy, finish}, nil},
		"in place, and Retain": {csi, with(before, func(s *seen) { s.directory, s.safe, s.retains, s.recorded = csi, true, true, true }),
			[]step{save, deleteClaim, awaitClaimGone, deleteVolume, awaitVolumeGone, awaitReport, createVolume, createClaim, awaitBound, finish}, nil},
		"in use": {csi, with(before, func(s *seen) { s.users = []string{"pod"} }), nil, errInUse},
		"a pod came after the claim was deleted": {csi, with(before, func(s *seen) {
			s.saved, s.safe, s.policy, s.claimGoing, s.users = true, true, false, true, []string{"pod"}
		}),
			[]step{awaitClaimGone, deleteVolume, awaitVolumeGone, move, record, awaitReport, createVolume, createClaim, awaitBound, restorePolicy, finish}, nil},
		"done":                        {csi, migrated, nil, nil},
		"done, and in use":            {csi, with(migrated, func(s *seen) { s.users = []string{"pod"} }), nil, nil},
		"the claim was deleted since": {csi, with(migrated, func(s *seen) { s.claim, s.bound, s.stale, s.policy, s.retains = absent, false, true, false, false }), nil, nil},
		"the claim was deleted before that was noted": {csi, with(migrated, func(s *seen) { s.finished, s.claim, s.bound, s.stale = false, absent, false, true }), []step{finish}, nil},
		"undo":                       {plain, with(migrated, func(s *seen) { s.recorded = false }), []step{reopen, retain, deleteClaim, awaitClaimGone, deleteVolume, awaitVolumeGone, move, record, createVolume, createClaim, awaitBound, restorePolicy, finish}, nil},
		"undo in use":                {plain, with(migrated, func(s *seen) { s.users = []string{"pod"} }), nil, errInUse},
		"undo of what was not begun": {plain, before, nil, nil},
		"its directory is elsewhere": {plain, with(migrated, func(s *seen) { s.directory, s.finished = absent, false }), nil, errMoved},
		"the directory is lost":      {csi, seen{saved: true}, nil, errMoved},
		"the directory was moved":    {csi, with(migrated, func(s *seen) { s.directory, s.finished = plain, false }), nil, errMoved},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			steps, err := plan(tt.want, tt.seen)
			if !errors.Is(err, tt.err) {
				t.Errorf("error %v, want %v", err, tt.err)
			}
			if diff := cmp.Diff(tt.steps, steps); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A world is a volume with all that decides about the next step.
type world struct {
	seen
	inPlace bool
	// had: the directory had a record before; has is which form's record it has now.
	had bool
	has form
}

// before is the world before a migration.
func before(inPlace, had, deletes bool) world {
	w := world{seen: seen{claim: plain, bound: true, volume: plain, policy: true, retains: !deletes, safe: !deletes, directory: plain}, inPlace: inPlace, had: had}
	if had {
		w.has = plain
	}
	return w
}

// as is what is seen on the way to a form.
func (w world) as(want form) seen {
	s := w.seen
	s.recorded = w.has == want || want == plain && !w.had && w.has == absent
	if w.inPlace {
		s.directory = want
		s.recorded = (want == csi || w.had) == (w.has != absent)
	}
	s.reported = want == csi && s.directory == csi
	return s
}

// step does the next step to a form, and checks that it cannot lose data.
func (w world) step(t *testing.T, want form) (world, step) {
	t.Helper()
	s := w.as(want)
	what, err := next(want, s)
	if err != nil {
		t.Fatalf("to %s from %#v: %v", want, w, err)
	}
	switch {
	case what == deleteVolume && (!s.safe || s.claim != absent),
		what == deleteClaim && !s.safe,
		(what == move || what == record) && (s.volume != absent || s.claim != absent),
		what == createVolume && s.directory != want,
		what == restorePolicy && !s.bound:
		t.Fatalf("step %d to %s from %#v", what, want, w)
	}
	w.seen = s.after(want, what)
	if what == record {
		w.has = want
		if want == plain && !w.had {
			w.has = absent
		}
	}
	w.recorded, w.reported = false, false
	if w.inPlace {
		w.directory = plain
	}
	return w, what
}

func (w world) key() string { return fmt.Sprintf("%#v", w) } // %v would ask seen for its text

// From every state that is reached by going to and fro, both ends are reached, whole, and nothing is lost on the way.
func TestStopAnywhereAndContinueEitherWay(t *testing.T) {
	states := 0
	for _, start := range []world{before(false, false, true), before(false, true, true), before(false, true, false), before(true, false, true), before(true, true, false)} {
		known := map[string]bool{start.key(): true}
		for queue := []world{start}; len(queue) > 0; queue = queue[1:] {
			states++
			for _, want := range []form{plain, csi} {
				w, _ := queue[0].step(t, want)
				if !known[w.key()] {
					known[w.key()] = true
					queue = append(queue, w)
				}
				wantEnd(t, queue[0], start, want)
			}
		}
	}
	if states < 100 {
		t.Errorf("only %d states were tried", states)
	}
}

// wantEnd goes to a form from a state.
func wantEnd(t *testing.T, w, start world, want form) {
	t.Helper()
	from := w
	var done []step
	for what := save; what != nothing; done = append(done, what) {
		if w, what = w.step(t, want); len(done) > 30 {
			t.Fatalf("no end to %s from %#v: %v", want, from, done)
		}
	}
	end := w.as(want)
	good := end.claim == want && end.volume == want && end.directory == want && end.bound && end.policy && !end.stale && end.recorded &&
		end.safe == start.safe && end.saved == (want == csi) && end.finished == (want == csi)
	if !good {
		t.Fatalf("to %s from %#v: %#v after %v", want, from, end, slices.Compact(done))
	}
}
