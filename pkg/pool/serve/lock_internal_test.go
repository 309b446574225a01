package serve

import (
	"errors"
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
	p := &Pool{Node: &Node{}}
	id := idOf("pvc-1")
	unlock := must.Value(p.Node.volumes.TryLock(id))(t)
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

func TestPins(t *testing.T) {
	var pins Pins
	a, b := idOf("pvc-1"), idOf("pvc-2")
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
	if pins.Used(a) {
		t.Error("a volume that was not published counts as used")
	}
	must.Succeed(t, pins.MayBeWritten(a), pins.MayBeWritten(b))
	pins.Pin(a, true)() // another copy comes and goes
	if !pins.Used(a) || pins.Used(b) {
		t.Errorf("of a volume that is copied and one that is not, both published, %v are used", pins.used)
	}
	third()
	if err := pins.Free(a); err != nil || len(pins.held) != 0 || pins.Used(a) {
		t.Errorf("after both ended: %v, %v are held, %v used", err, pins.held, pins.used)
	}
}
