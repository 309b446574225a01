package pool_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// provisionerAndDriver are two processes with a pool each, and a volume of the first that goes to the second.
func provisionerAndDriver(t *testing.T) (provisioner, driver *harness, h store.Handover) {
	root := t.TempDir()
	var sides []*harness
	for _, name := range []string{"provisioner", "driver"} {
		must.Succeed(t, os.Mkdir(filepath.Join(root, name), 0o755))
		b := newHarness(t, filepath.Join(root, name))
		b.start(`[{"name":"local","path":"pool"}]`)
		sides = append(sides, b)
	}
	sides[0].create("pvc-1", 10*mib)
	must.Succeed(t, os.WriteFile(sides[0].Path("pool", "pvc-1", "data"), []byte("kept"), 0o600))
	return sides[0], sides[1], store.Handover{
		From: store.VolumePath{Directory: sides[0].Path("pool"), Name: "pvc-1"},
		To:   store.VolumePath{Directory: sides[1].Path("pool"), Name: "pvc-1"},
	}
}

// The processes that serve the two pools run meanwhile: one has the volume as soon as it is asked, with its promise,
// and counts the promise a minute later. The other one does not report it as lost.
func TestHandoverIsSeenByBothPools(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *harness) {
		provisioner, driver, h := provisionerAndDriver(t)
		must.Succeed(t, h.Check())
		must.Succeed(t, h.Move())
		must.Succeed(t, h.Record(1))
		got, err := driver.Volume(t.Context(), id(t, "pvc-1"))
		if err != nil || got.Bytes != 10*mib {
			t.Errorf("%+v (%v)", got, err)
		}
		must.Succeed(t, driver.publish("pvc-1", "a"))
		must.Succeed(t, driver.unpublish("pvc-1", "a"))
		driver.later(time.Minute)
		driver.wantVolumes("pvc-1")
		provisioner.wantVolumes()
		if a, b := driver.Status()[0].Promised, provisioner.Status()[0].Promised; a != 10*mib || b != 0 {
			t.Errorf("the driver counts a promise of %d, the provisioner one of %d", a, b)
		}
		// And back.
		must.Succeed(t, h.Reverse().Check())
		must.Succeed(t, h.Reverse().Move())
		must.Succeed(t, h.Reverse().Record(1))
		driver.later(time.Minute)
		provisioner.wantVolumes("pvc-1")
		driver.wantVolumes()
		provisioner.delete("pvc-1")
	})
}
