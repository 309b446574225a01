package ledger

import (
	"errors"
	"maps"
	"testing"
)

// promised is of a volume with a directory and a promise.
func promised(bytes int64) Info { return Info{Promised: bytes, flags: HasDirectory | HasRecord} }

func (l *Ledger) promises() map[string]int64 {
	all := map[string]int64{}
	for id, c := range l.Each(Info.Exists) {
		all[id.String()] = c.Promised
	}
	return all
}

// read puts volumes of 4 KiB into a load.
func read(load *Load, names ...string) *Load {
	for _, name := range names {
		load.Put(idOf(name), promised(4096))
	}
	return load
}

func wantPromises(t *testing.T, l *Ledger, want map[string]int64) {
	t.Helper()
	var sum int64
	for _, bytes := range want {
		sum += bytes
	}
	if got := l.promises(); !maps.Equal(got, want) {
		t.Errorf("promised are %v, want %v", got, want)
	}
	if l.sums.promised != sum || l.index.promised != sum || len(l.loads) > 0 {
		t.Errorf("the ledger has %d bytes and the index %d, want %d; %d loads go on, want none", l.sums.promised, l.index.promised, sum, len(l.loads))
	}
}

// Calls of this node do not hide what other nodes have promised from a shared pool, and are
// not undone by what was read before them.
func TestLoad(t *testing.T) {
	t.Run("calls meanwhile", func(t *testing.T) {
		l := New(Policy{})
		load := read(l.BeginLoad(), "grown", "gone", "undone", "others")
		l.Note(idOf("grown"), promised(8192))
		l.Note(idOf("gone"), promised(4096))
		l.Note(idOf("gone"), Info{})
		(&Reservation{ledger: l}).Commit(idOf("made"), promised(16384))
		l.Note(idOf("undone"), Info{}) // it was never known
		load.End(nil)
		wantPromises(t, l, map[string]int64{"grown": 8192, "others": 4096, "made": 16384})
	})
	t.Run("a later one ends first", func(t *testing.T) {
		l := New(Policy{})
		slow := read(l.BeginLoad(), "before")
		read(l.BeginLoad(), "before", "others").End(nil)
		slow.End(nil)
		wantPromises(t, l, map[string]int64{"before": 4096, "others": 4096})
	})
	t.Run("a later one fails", func(t *testing.T) {
		l := New(Policy{})
		slow := read(l.BeginLoad(), "before")
		l.BeginLoad().End(errors.New("a disk"))
		slow.End(nil)
		wantPromises(t, l, map[string]int64{"before": 4096})
	})
	// A removal drops the record before its trash is counted. In a shared pool others may
	// read the records just then, and something may be sold.
	t.Run("in the midst of a removal", func(t *testing.T) {
		l := New(Policy{})
		read(l.BeginLoad(), "removed", "stays").End(nil)
		until := l.Keep(idOf("removed"))
		read(l.BeginLoad(), "stays").End(nil)
		wantPromises(t, l, map[string]int64{"removed": 4096, "stays": 4096})
		until()
		read(l.BeginLoad(), "stays").End(nil)
		wantPromises(t, l, map[string]int64{"stays": 4096})
	})
}

// Were the mutex needed, the test would not end.
func TestSummaryTakesNoLock(t *testing.T) {
	l := New(Policy{})
	l.Note(idOf("pvc-1"), promised(4096))
	l.mu.Lock()
	defer l.mu.Unlock()
	if got := l.Summary(); got.Volumes != 1 || got.Promised != 4096 {
		t.Errorf("summary %+v, want one volume of 4096 bytes", got)
	}
}
