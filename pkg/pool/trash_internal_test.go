package pool

import (
	"os"
	"path/filepath"
	"testing"
)

// A sync reads the names in the trash, and the reaper erases them meanwhile.
func TestSyncDoesNotQueueErasedTrash(t *testing.T) {
	v := aVisit(t)
	p := v.pool
	find := func(name string) {
		if err := v.recoverTrashed(name); err != nil {
			t.Error(err)
		}
	}
	want := func(when string, pieces int) {
		if got := p.ledger.Summary().Trash.Pieces; got != pieces {
			t.Errorf("%s: %d pieces, want %d", when, got, pieces)
		}
	}

	p.thrown("erased+1")
	p.ledger.TrashTried("erased+1", nil)
	find("erased+1")
	want("after what was listed is erased", 0)

	if err := os.Mkdir(filepath.Join(v.store.Trash().String(), "left"), 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		find("left")
		want("after what is there is found", 1)
	}
}
