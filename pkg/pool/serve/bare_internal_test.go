package serve

import (
	"errors"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A pool that gets its layout is opened anew, and recovered, only while no call is at work in it: recovery takes what a
// call works on for what a crash has left.
func TestEquip_waitsForCalls(t *testing.T) {
	testenv.NeedRoot(t)
	p := onePool(t, filepath.Join(t.TempDir(), "pool"), "false")
	before := p.identity.Load()
	call, err := p.Enter()
	must.Succeed(t, err)
	equipped, err := p.equip(t.Context(), before)
	if err != nil || equipped != nil || p.identity.Load() != before {
		t.Fatalf("during a call it is opened anew: %v, %v", equipped, err)
	}
	call.Close()

	equipped, err = p.equip(t.Context(), before)
	must.Succeed(t, err)
	equipped.Close()
	if p.identity.Load() == before {
		t.Error("after the call it is not opened anew")
	}
	// A call that has begun with what it was before was not counted.
	if v, err := p.enter(before, p.state.Load()); !errors.Is(err, ErrNotChecked) {
		t.Errorf("it enters: %v, %v", v, err)
	}
}
