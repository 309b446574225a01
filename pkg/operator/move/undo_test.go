package move

import (
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A target whose node answers, and whose disk does not, keeps no pod from the source: deleting the VolumeMove ends the fence, at any step
// until the PersistentVolume leads to the target.
func TestUndoWithoutDiskOfTarget(t *testing.T) {
	for _, phase := range []v1alpha1.Phase{v1alpha1.Fenced, v1alpha1.Switching} {
		t.Run(string(phase), func(t *testing.T) {
			w := newWorld(t, moveOf("m"), appPod("data-0", false))
			at, passed := 0, time.Duration(0)
			w.clock = func() time.Time { return time.Now().Add(passed) }
			w.run("m", func(look int) {
				switch m := w.move("m"); {
				case at == 0 && m.Status.Phase == phase:
					at = look
					w.hangs = nodeB
					must.Succeed(t, w.api.Delete(t.Context(), m))
				case at > 0 && look == at+5:
					passed = patience
				case look == at+long:
					if !w.records[nodeA].publishes() {
						t.Errorf("the source has %+v: %s", w.records[nodeA], w.says("m"))
					}
					w.hangs = ""
				}
			})
			w.wantOn(nodeA)
		})
	}
}
