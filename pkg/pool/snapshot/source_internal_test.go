package snapshot

import (
	"errors"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func idOf(t *testing.T, entry string) volume.ID {
	t.Helper()
	id, err := volume.ParseEntry(entry)
	must.Succeed(t, err)
	return id
}

// recordOf is a record of an entry that was made from another; of none, if that is empty.
func recordOf(t *testing.T, entry, from string) *store.Record {
	t.Helper()
	rec := store.NewRecord(idOf(t, entry), volume.ModeMount, 8192)
	if from != "" {
		rec.Origin = &volume.Origin{ID: from, UID: "x", Bytes: 4096, Method: volume.ByCopy, Consistency: volume.PointInTime}
	}
	return rec
}

func TestPins(t *testing.T) {
	var pins Pins
	a, b := idOf(t, "pvc-1"), idOf(t, "~s-1")
	first, second := pins.Pin(a, false), pins.Pin(a, true)
	must.ErrorIs(t, pins.MayBeWritten(a), volume.ErrBusy)
	for i, unpin := range []func(){first, second} {
		if err := pins.Free(a); !errors.Is(err, volume.ErrBusy) {
			t.Errorf("after %d of 2 copies ended: %v, want ErrBusy", i, err)
		}
		if err := pins.Free(b); err != nil {
			t.Errorf("another entry: %v", err)
		}
		unpin()
	}
	third := pins.Pin(a, false)
	must.Succeed(t, pins.MayBeWritten(a))
	third()
	if err := pins.Free(a); err != nil || len(pins.held) != 0 {
		t.Errorf("after both ended: %v, %v are held", err, pins.held)
	}
}

func TestWantedIsOf(t *testing.T) {
	snapshot := &Wanted{ID: idOf(t, "~s-1")}
	for name, test := range map[string]struct {
		wanted *Wanted
		rec    *store.Record
		want   bool
	}{
		"empty and asked for empty":    {nil, recordOf(t, "pvc-1", ""), true},
		"no record, asked for empty":   {nil, nil, true},
		"made from the source":         {snapshot, recordOf(t, "pvc-1", "~s-1"), true},
		"made from another":            {snapshot, recordOf(t, "pvc-1", "~s-2"), false},
		"made from a volume so named":  {snapshot, recordOf(t, "pvc-1", "s-1"), false},
		"empty, asked for a copy":      {snapshot, recordOf(t, "pvc-1", ""), false},
		"no record, asked for a copy":  {snapshot, nil, false},
		"made from some, asked for no": {nil, recordOf(t, "pvc-1", "~s-1"), false},
	} {
		if got := test.wanted.IsOf(test.rec); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// The size of a snapshot's volume is the smallest of a restore, and not what the snapshot holds.
func TestSourceSize(t *testing.T) {
	for entry, want := range map[string]int64{"pvc-1": 8192, "~s-1": 4096} {
		s := &Source{id: idOf(t, entry), entry: store.Entry{Record: recordOf(t, entry, "pvc-0")}}
		if got := s.AtLeast(volume.Range{}); got.Required != want {
			t.Errorf("a copy of %s without a size is asked for %d bytes, want %d", entry, got.Required, want)
		}
		if got := s.AtLeast(volume.Range{Limit: 1024}); got.Required != 1024 {
			t.Errorf("with a limit of 1024 bytes: %d", got.Required)
		}
		if err := s.fits(want); err != nil {
			t.Error(err)
		}
		if err := s.fits(want - 1); !errors.Is(err, volume.ErrOutOfRange) {
			t.Errorf("a copy of %s that is one byte smaller: %v, want ErrOutOfRange", entry, err)
		}
	}
}

// Only what does not fit is turned into an answer that csi-snapshotter takes for final.
func TestNotPossible(t *testing.T) {
	if err := new(Pool).NotPossible(volume.ErrNoSpace); !errors.Is(err, volume.ErrPrecondition) || errors.Is(err, volume.ErrNoSpace) {
		t.Errorf("no space: %v, want ErrPrecondition alone", err)
	}
	if err := new(Pool).NotPossible(volume.ErrIO); !errors.Is(err, volume.ErrIO) {
		t.Errorf("an I/O error became %v", err)
	}
}
