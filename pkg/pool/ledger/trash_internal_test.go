package ledger

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Of a name that comes again while an older piece is stuck, there is one piece.
func TestReusedNameIsErasedOnce(t *testing.T) {
	l := New(Policy{})
	l.Trash().Throw("stuck", 1)
	l.Trash().Tried("stuck", errors.New("it cannot be removed"))
	for range 2 {
		l.Trash().Throw("pvc-1.u", 1)
		wantTrash(t, l, false, "pvc-1.u")
		wantTrash(t, l, true, "pvc-1.u", "stuck")
		l.Trash().Tried("pvc-1.u", nil)
	}
	if sum := l.trash.sum(); sum.Pieces != 1 || sum.Stuck != 1 {
		t.Errorf("%+v, want one piece, which is stuck", sum)
	}
}

// Trash of several pages comes in the order in which it was thrown, whatever was erased or failed in between.
func TestTrash_pages(t *testing.T) {
	l := New(Policy{})
	var waiting, stuck []string
	for i := range 3*chunk + 7 {
		name := fmt.Sprint(i)
		l.Trash().Throw(name, 1)
		switch {
		case i < chunk/2, i%5 == 0, i > 3*chunk: // at the start, within and at the end
			l.Trash().Tried(name, nil)
		case i%7 == 0:
			l.Trash().Tried(name, errors.New("it cannot be removed"))
			stuck = append(stuck, name)
		default:
			waiting = append(waiting, name)
		}
	}
	wantTrash(t, l, false, waiting...)
	wantTrash(t, l, true, slices.Concat(waiting, stuck)...)
	for _, name := range slices.Concat(stuck, waiting) {
		l.Trash().Tried(name, nil)
	}
	wantTrash(t, l, true)
	l.Trash().Throw("again", 1)
	wantTrash(t, l, true, "again")
}

func wantTrash(t *testing.T, l *Ledger, stuckToo bool, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, l.Trash().Names(stuckToo), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("with what is stuck: %t (-want +got):\n%s", stuckToo, diff)
	}
}

// How long the reaper keeps one waiting that it cannot erase says nothing of whether it keeps up.
func TestOldestTrashIgnoresStuck(t *testing.T) {
	var trash trash
	began := time.Now()
	for i, name := range []string{"pvc-1.u", "pvc-2.u", "pvc-3.u"} {
		trash.add(name, 1, began.Add(time.Duration(i)*time.Hour))
	}
	stuck := errors.New("it cannot be removed")
	for _, c := range []struct {
		name string
		err  error
		want sum
	}{
		{"pvc-2.u", stuck, sum{stuck: 1, since: began}},
		{"pvc-1.u", stuck, sum{stuck: 2, since: began.Add(2 * time.Hour)}},
		{"pvc-1.u", stuck, sum{stuck: 2, since: began.Add(2 * time.Hour)}},
		{"pvc-3.u", nil, sum{stuck: 2}},
		{"pvc-1.u", nil, sum{stuck: 1}},
		{"pvc-2.u", nil, sum{}},
	} {
		trash.tried(c.name, c.err)
		if got := trash.sum(); got.Stuck != c.want.stuck || !got.Since.Equal(c.want.since) {
			t.Errorf("after %s was tried: %d are stuck, the oldest that is not is from %v; want %+v", c.name, got.Stuck, got.Since, c.want)
		}
	}
}

func TestOldestTrash(t *testing.T) {
	var trash trash
	first := time.Now()
	want := func(since time.Time) {
		t.Helper()
		if got := trash.sum().Since; !got.Equal(since) {
			t.Errorf("the oldest trash is from %v, want %v", got, since)
		}
	}
	trash.add("first.u", 1, first)
	for range 300 { // these come and go behind it
		trash.add("pvc-1.u", 1, first.Add(time.Minute))
		want(first)
		trash.tried("pvc-1.u", nil)
	}
	trash.add("second.u", 1, first.Add(time.Hour))
	want(first)
	trash.tried("first.u", nil)
	want(first.Add(time.Hour))
	trash.tried("second.u", nil)
	want(time.Time{})
}

// sum is the part of a TrashSum that is checked there.
type sum struct {
	stuck int
	since time.Time
}

func TestTrashIsErasedOnce(t *testing.T) {
	l := New(Policy{})
	l.Trash().Throw("pvc-1.u", 1)
	for range 2 {
		if got := l.Trash().ID("pvc-1.u", 7); got != 7 {
			t.Errorf("id %d, want 7", got)
		}
		l.Trash().Tried("pvc-1.u", nil)
	}
	l.Trash().Tried("pvc-1.u", errors.New("it cannot be removed"))
	if got := l.Summary(); got.Trash.Pieces != 0 || got.Trash.Stuck != 0 || got.Erased != 1 || l.sums.trashed != 0 {
		t.Errorf("%+v; want one erased and nothing left", got)
	}
}

func TestThrowFoundIgnoresWhatMayBeErased(t *testing.T) {
	l := New(Policy{})
	seen := l.Trash().Erased()
	l.Trash().Throw("erased", 1)
	l.Trash().Tried("erased", nil)
	if l.Trash().ThrowFound("erased", 1, seen) || l.Trash().Has("erased") {
		t.Error("a piece that was erased since it was found is queued again")
	}
	if !l.Trash().ThrowFound("left", volume.Unknown, l.Trash().Erased()) || l.Trash().ThrowFound("left", volume.Unknown, l.Trash().Erased()) || l.sums.unknown != 1 {
		t.Errorf("%+v; want one piece of unknown size", l.Summary())
	}
}
