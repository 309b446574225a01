package serve

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
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
	p := &Pool{node: &Node{}}
	id := idOf("pvc-1")
	unlock, err := p.node.volumes.TryLock(id)
	must.Succeed(t, err)
	defer unlock()
	done := 0
	do := func() error { done++; return nil }
	must.Succeed(t, p.unlessBusy(id, do))
	if done != 1 || p.checks.skipped {
		t.Errorf("before the pool was opened: done %d times, skipped %v", done, p.checks.skipped)
	}
	p.identity.Store(&opened{})
	must.Succeed(t, p.unlessBusy(id, do))
	if done != 1 || !p.checks.skipped {
		t.Errorf("while the pool serves: done %d times, skipped %v", done, p.checks.skipped)
	}
}
