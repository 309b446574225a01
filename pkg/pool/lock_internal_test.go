package pool

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/pool/keylock"
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
	p := &Pool{locks: &keylock.Locks[volume.ID]{}}
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
