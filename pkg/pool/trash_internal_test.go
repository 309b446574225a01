package pool

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Of a name that comes again while an older piece is stuck, there is one piece.
func TestANameThatComesAgainIsErasedOnce(t *testing.T) {
	var trash trash
	trash.add("stuck", 1, time.Now())
	trash.tried("stuck", errors.New("it cannot be removed"))
	for range 2 {
		trash.add("pvc-1.u", 1, time.Now())
		if diff := cmp.Diff([]string{"pvc-1.u"}, trash.queued(false)); diff != "" {
			t.Errorf("queued (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]string{"pvc-1.u", "stuck"}, trash.queued(true)); diff != "" {
			t.Errorf("queued with what is stuck (-want +got):\n%s", diff)
		}
		trash.tried("pvc-1.u", nil)
	}
	if sum := trash.sum(); sum.pieces != 1 || sum.stuck != 1 {
		t.Errorf("%+v, want one piece, which is stuck", sum)
	}
}

// How long the reaper keeps one waiting that it cannot erase says nothing of whether it keeps up.
func TestTheOldestPieceOfTrashIsNoneThatIsStuck(t *testing.T) {
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
		if got := trash.sum(); got.stuck != c.want.stuck || !got.since.Equal(c.want.since) {
			t.Errorf("after %s was tried: %d are stuck, the oldest that is not is from %v; want %+v", c.name, got.stuck, got.since, c.want)
		}
	}
}

func TestTheOldestOfManyPiecesOfTrashIsKnown(t *testing.T) {
	var trash trash
	first := time.Now()
	want := func(since time.Time) {
		t.Helper()
		if got := trash.sum().since; !got.Equal(since) {
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

// sum is the part of a trashSum that is looked at there.
type sum struct {
	stuck int
	since time.Time
}

func TestAPieceOfTrashThatIsGoneIsErasedNoSecondTime(t *testing.T) {
	p := &Pool{wake: make(chan struct{}, 1)}
	p.trashed("pvc-1.u", 1)
	for range 2 {
		if got := p.remember("pvc-1.u", 7); got != 7 {
			t.Errorf("id %d, want 7", got)
		}
		p.reaped("pvc-1.u", nil)
	}
	p.reaped("pvc-1.u", errors.New("it cannot be removed"))
	if sum, erased := p.trash.sum(), p.erased.pieces.Load(); sum.pieces != 0 || sum.stuck != 0 || erased != 1 || p.ledger.trashed != 0 {
		t.Errorf("%+v, %d erased, %d bytes; want one erased and nothing left", sum, erased, p.ledger.trashed)
	}
}

// A sync reads the names in the trash, and the reaper erases them meanwhile.
func TestTrashThatIsErasedWhileItIsFoundIsNotQueuedAgain(t *testing.T) {
	path := t.TempDir()
	d, err := dir.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	p := &Pool{wake: make(chan struct{}, 1)}
	s := &session{pool: p, trash: d}
	find := func(name string) {
		if err := s.recoverTrashed(name); err != nil {
			t.Error(err)
		}
	}
	want := func(when string, pieces, unknown int) {
		if got := p.trash.sum().pieces; got != pieces || p.ledger.unknown != unknown {
			t.Errorf("%s: %d pieces, %d of unknown size; want %d and %d", when, got, p.ledger.unknown, pieces, unknown)
		}
	}

	p.trashed("erased", 1)
	p.reaped("erased", nil)
	find("erased")
	want("after what was listed is erased", 0, 0)

	seen := p.erased.pieces.Load()
	p.trashed("erased", 1)
	p.reaped("erased", nil)
	p.foundTrash("erased", 1, seen)
	want("after what was seen is erased", 0, 0)

	if err := os.Mkdir(filepath.Join(path, "left"), 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		find("left")
		want("after what is there is found", 1, 1)
	}
}
