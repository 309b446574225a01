package reconcile_test

import (
	"math"
	"sync/atomic"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// makeShared makes a directory volume that holds so many bytes, all of which the others of its family hold too.
func makeShared(t *testing.T, p *reconcile.View, f *quotatest.Fake, name, family string, bytes int64) (volume.ID, store.Entry) {
	t.Helper()
	id, err := volume.ParseID(name)
	must.Succeed(t, err)
	rec := store.NewRecord(id, volume.ModeMount, 2*bytes)
	rec.Family = family
	d, applied, err := p.Enforcer.Make(p.Store.Root(), p.Store.Root(), name, rec.UID, reconcile.InfoOf(store.Entry{Record: rec}))
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, d.Close()) })
	rec.Quota, rec.ProjectID = string(applied.Kind), uint64(applied.ID)
	must.Succeed(t, f.Write(d, bytes), p.Store.Records().Write(rec))
	e := store.Entry{Record: rec, Present: true}
	p.Ledger.Note(id, reconcile.InfoOf(e))
	return id, e
}

// remove moves a volume to the trash, which is known to be that until a restart.
func remove(t *testing.T, p *reconcile.View, id volume.ID, e store.Entry, known bool) {
	t.Helper()
	piece, err := p.Store.Trash().Remove(id, store.Trashed(id, e))
	must.Succeed(t, err, p.Store.Records().Drop(id))
	p.Ledger.Note(id, ledger.Info{})
	p.Ledger.Trash().Throw(piece, e.Promised())
	if known {
		p.Ledger.Trash().Removed(piece, e.Record.Family)
	}
}

// What shares blocks holds them once, also when a part of it is in the trash: else what others hold would be hidden, and sold when
// that is erased.
func TestFamilyInTrashHoldsItsBlocksOnce(t *testing.T) {
	for _, known := range []bool{true, false} {
		f := &quotatest.Fake{As: quota.XFS}
		p := newPool(t, f)
		want := func(when string, bytes int64) {
			t.Helper()
			if held, ok := p.Usage().Held(new(atomic.Int64), func() {}); !ok || held.Bytes != bytes {
				t.Errorf("known %v, %s: %d MiB are held, %v; want %d", known, when, held.Bytes/mib, ok, bytes/mib)
			}
		}
		_, _ = makeShared(t, p, f, "pvc-alone", "", 4*mib)
		first, e := makeShared(t, p, f, "pvc-first", "family", 32*mib)
		second, other := makeShared(t, p, f, "pvc-second", "family", 33*mib)
		makeShared(t, p, f, "pvc-third", "family", 16*mib)
		want("before", 37*mib)
		remove(t, p, first, e, known)
		want("with the first in the trash", 37*mib)
		if known {
			remove(t, p, second, other, known)
			want("with both in the trash", 37*mib)
		}
	}
}

// What counts for several directories is on the disk once: of none of them it is sure whose it is.
func TestSharedBlocksAreHeldByNoneAlone(t *testing.T) {
	f := &quotatest.Fake{As: quota.Btrfs}
	p := newPool(t, f)
	share := func(name string, bytes int64) {
		t.Helper()
		d := must.Value(p.Store.Root().Open(name))(t)
		must.Succeed(t, f.Share(d, bytes), d.Close())
	}
	_, _ = makeShared(t, p, f, "pvc-alone", "", 16*mib)
	share("pvc-alone", 12*mib)
	for _, name := range []string{"pvc-first", "pvc-second"} { // a restart forgets that they were a family
		id, e := makeShared(t, p, f, name, "family", 32*mib)
		share(name, 31*mib)
		remove(t, p, id, e, false)
	}
	if held, ok := p.Usage().Held(new(atomic.Int64), func() {}); !ok || held.Bytes != 6*mib {
		t.Errorf("%d MiB are held, %v; want 6", held.Bytes/mib, ok)
	}
}

// What others share with each other counts where families may have the same blocks, and no more of it than these could hide.
func TestForeign(t *testing.T) {
	for name, c := range map[string]struct {
		held   reconcile.Held
		others reconcile.Others
		trees  int64
		want   int64
	}{
		"all is known":                   {reconcile.Held{Bytes: 60}, reconcile.Others{Alone: 40}, 0, 40},
		"nothing is known of others":     {reconcile.Held{Bytes: 60}, reconcile.Others{Alone: math.MaxInt64}, 0, 100},
		"held twice":                     {reconcile.Held{Bytes: 90}, reconcile.Others{Alone: 40}, 0, 40},
		"one family":                     {reconcile.Held{Bytes: 60, Families: 50, Family: 50}, reconcile.Others{Alone: 10, Shared: 60}, 0, 40},
		"two families that share":        {reconcile.Held{Bytes: 90, Families: 60, Family: 30}, reconcile.Others{Alone: 10, Shared: 60}, 0, 40},
		"two that share nothing":         {reconcile.Held{Bytes: 60, Families: 40, Family: 20}, reconcile.Others{Alone: 10, Shared: 60}, 0, 40},
		"others that share with volumes": {reconcile.Held{Bytes: 90, Families: 20, Family: 15}, reconcile.Others{Alone: 5, Shared: 180}, 0, 15},
		"trees":                          {reconcile.Held{Bytes: 90, Families: 80, Family: 40}, reconcile.Others{Alone: 10}, 15, 25},
		"all counts twice":               {reconcile.Held{Bytes: 90, Families: 200, Family: 50}, reconcile.Others{Alone: 5, Shared: 300}, 0, 100},
	} {
		if got := c.held.Foreign(100, c.others, quota.Trees{Uncounted: c.trees}); got != c.want {
			t.Errorf("%s: %d of 100 are foreign, want %d", name, got, c.want)
		}
	}
}

// What is in the trash since before a start counts in full where no blocks are shared.
func TestUnknownTrashHoldsWhatItHas(t *testing.T) {
	f := &quotatest.Fake{As: quota.XFS}
	p := newPool(t, f)
	id, e := makeShared(t, p, f, "pvc-1", "", 32*mib)
	remove(t, p, id, e, false)
	if held, ok := p.Usage().Held(new(atomic.Int64), func() {}); !ok || held.Bytes != 32*mib {
		t.Errorf("%d MiB are held, %v; want 32", held.Bytes/mib, ok)
	}
}

// A meddler is a quota that does something once, when it is asked for the use of a volume for the first time.
type meddler struct {
	*quotatest.Fake
	then func()
}

func (m *meddler) Usage(d *dir.Dir, id quota.ID) (quota.Usage, error) {
	usage, err := m.Fake.Usage(d, id)
	if then := m.then; then != nil {
		m.then = nil
		then()
	}
	return usage, err
}

// A volume that is deleted while all are counted is not counted as a volume and as trash: what others hold would seem to be
// less than it is, and be sold.
func TestVolumeDeletedWhileCountedHoldsItsBytesOnce(t *testing.T) {
	f := &meddler{Fake: &quotatest.Fake{As: quota.XFS}}
	p := newPool(t, f)
	id, e := makeShared(t, p, f.Fake, "pvc-1", "", 32*mib)
	f.then = func() { remove(t, p, id, e, true) }
	if held, ok := p.Usage().Held(new(atomic.Int64), func() {}); !ok || held.Bytes != 32*mib {
		t.Errorf("%d MiB are held, %v; want 32", held.Bytes/mib, ok)
	}
}
