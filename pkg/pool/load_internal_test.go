package pool

import (
	"testing"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

func idOf(name string) volume.ID {
	id, err := volume.ParseID(name)
	if err != nil {
		panic(err)
	}
	return id
}

func nodeOf(name string) volume.NodeID {
	node, err := volume.ParseNodeID(name)
	if err != nil {
		panic(err)
	}
	return node
}

// Pools are opened side by side, and two may have volumes of one name.
func TestLockedVolumeIsRecoveredDuringOpen(t *testing.T) {
	p := &Pool{locks: &Locks[volume.ID]{}}
	id := idOf("pvc-1")
	unlock, err := p.locks.TryLock(id)
	must(t, err)
	defer unlock()
	done := 0
	do := func() error { done++; return nil }
	must(t, p.unlessBusy(id, do))
	if done != 1 || p.skipped {
		t.Errorf("before the pool was opened: done %d times, skipped %v", done, p.skipped)
	}
	p.identity.Store(&opened{})
	must(t, p.unlessBusy(id, do))
	if done != 1 || !p.skipped {
		t.Errorf("while the pool serves: done %d times, skipped %v", done, p.skipped)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// aVisit is one of an empty pool that no background work touches.
func aVisit(t *testing.T) *visit {
	t.Helper()
	configs, err := poolconfig.Parse(`[{"name":"local","path":"`+t.TempDir()+`"}]`, "/")
	must(t, err)
	mounts := &bindtest.Fake{}
	p := newPool(configs[0], &Set{options: Options{Node: nodeOf("node-1"), Mounts: mounts, Log: logr.Discard()}.withDefaults()})
	s, f, err := store.Create(t.Context(), p.at)
	must(t, err)
	t.Cleanup(func() { s.Close(); must(t, mounts.Close()) })
	id, err := p.identify(s, f)
	must(t, err)
	return &visit{pool: p, store: s, keeper: id.keeper}
}
