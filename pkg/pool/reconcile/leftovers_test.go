package reconcile_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// aPool is an empty pool without quotas, on which no call works.
func aPool(t *testing.T) *reconcile.Leftovers {
	t.Helper()
	p := &reconcile.Leftovers{
		Pool:       newPool(t, nil),
		UnlessBusy: func(_ volume.ID, do func() error) error { return do() },
		Wake:       func() {},
	}
	p.Thrown = func(name string) { p.Ledger.Trash().Throw(name, store.ParseThrown(name).Promised) }
	return p
}

func wantTrash(t *testing.T, p *reconcile.Leftovers, when string, pieces int) {
	t.Helper()
	if got := p.Ledger.Summary().Trash.Pieces; got != pieces {
		t.Errorf("%s: %d pieces, want %d", when, got, pieces)
	}
}

// A sync reads the names in the trash, and the reaper erases them meanwhile.
func TestSyncDoesNotQueueErasedTrash(t *testing.T) {
	p := aPool(t)
	p.Thrown("erased+1")
	p.Ledger.Trash().Tried("erased+1", nil)
	must.Succeed(t, p.RecoverTrashed("erased+1"))
	wantTrash(t, p, "after what was listed is erased", 0)

	must.Succeed(t, os.Mkdir(filepath.Join(p.Store.Trash().String(), "left"), 0o700))
	for range 2 {
		must.Succeed(t, p.RecoverTrashed("left"))
		wantTrash(t, p, "after what is there is found", 1)
	}
}

func TestInterruptedCreationIsErased(t *testing.T) {
	p := aPool(t)
	id, err := volume.ParseID("pvc-1")
	must.Succeed(t, err)
	must.Succeed(t, p.Store.Records().Write(store.NewRecord(id, volume.ModeMount, 4096)))
	must.Succeed(t, os.MkdirAll(filepath.Join(p.Store.Creating().String(), "pvc-1", "data"), 0o700))

	must.Succeed(t, p.RecoverCreations(p.Store.Creating()))
	wantTrash(t, p, "after the creation is undone", 1)
	if rec, err := p.Store.Records().Read(id); rec != nil || err != nil {
		t.Errorf("the record is %+v, %v, want none", rec, err)
	}
	var files atomic.Uint64
	p.Erase(t.Context(), p.Ledger.Trash().Names(true), &files)
	wantTrash(t, p, "after it is erased", 0)
	if files.Load() == 0 {
		t.Error("no file was counted")
	}
	left, err := os.ReadDir(p.Store.Trash().String())
	if err != nil && !errors.Is(err, fs.ErrNotExist) || len(left) > 0 {
		t.Errorf("%v is left in the trash, %v", left, err)
	}
}
