package reconcile_test

import (
	"os"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func idOf(t *testing.T, name string) volume.ID {
	t.Helper()
	id := must.Value(volume.ParseID(name))(t)
	return id
}

func TestResync(t *testing.T) {
	for title, busy := range map[string]error{"no call": nil, "a call on each volume": volume.ErrBusy} {
		t.Run(title, func(t *testing.T) {
			p := newPool(t, nil)
			p.Lock = func(volume.ID) (func(), error) { return func() {}, busy }
			for _, name := range []string{"same", "gone", "recorded"} {
				must.Succeed(t, os.Mkdir(filepath.Join(p.Config.Path, name), 0o755))
			}
			must.Succeed(t, p.Index().Load())
			must.Succeed(t, os.Remove(filepath.Join(p.Config.Path, "gone")))
			must.Succeed(t, os.Mkdir(filepath.Join(p.Config.Path, "new"), 0o755))
			must.Succeed(t, p.Store.Records().Write(store.NewRecord(idOf(t, "recorded"), volume.ModeMount, 4096)))
			must.Succeed(t, p.Index().Resync())
			for name, want := range map[string]bool{"same": true, "gone": busy != nil, "new": busy == nil} {
				if got := p.Ledger.Known(idOf(t, name)).Exists(); got != want {
					t.Errorf("%s is known: %v, want %v", name, got, want)
				}
			}
			if got, want := p.Ledger.Known(idOf(t, "recorded")).Recorded(), busy == nil; got != want {
				t.Errorf("the new record is known: %v, want %v", got, want)
			}
		})
	}
}

// A record whose directory is not there is a lost volume, unless a call has the lock.
func TestLookupSettled(t *testing.T) {
	p := newPool(t, nil)
	id := idOf(t, "pvc-1")
	must.Succeed(t, p.Store.Records().Write(store.NewRecord(id, volume.ModeMount, 4096)))
	for name, busy := range map[string]error{"no call": nil, "a call": volume.ErrBusy} {
		p.Lock = func(volume.ID) (func(), error) { return func() {}, busy }
		e, _, err := p.LookupSettled(id)
		must.Succeed(t, err)
		if e.Exists() != (busy == nil) {
			t.Errorf("with %s at work the entry is %+v", name, e)
		}
	}
}
