package move

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// An administrator is what removes the PersistentVolume of a move by hand, takes a while, and makes another one.
type administrator struct {
	*harness
	began int // the look at which the PersistentVolume was removed; 0 for not yet
}

// while is for how many looks there is none.
const while = 5

// removes removes the PersistentVolume, and ends the pod.
func (a *administrator) removes(look int) {
	a.Helper()
	a.began, a.replicas = look, false
	volume := volumeOf("pv")
	a.has(volume)
	volume.Finalizers = nil
	a.update(volume)
	must.Succeed(a, client.IgnoreNotFound(a.api.Delete(a.Context(), appPod("data-0", false))), a.api.Delete(a.Context(), volume))
}

// makes makes one that leads to a node.
func (a *administrator) makes(on string, annotations map[string]string) {
	a.Helper()
	volume := volumeOf("pv")
	volume.UID, volume.Spec.NodeAffinity = "by hand", onNode(on)
	for key, value := range annotations {
		volume.Annotations[key] = value
	}
	must.Succeed(a, a.api.Create(a.Context(), volume))
}

// wantMade expects that one, and that it leads to the volume.
func (a *administrator) wantMade(on string) {
	a.Helper()
	volume := volumeOf("pv")
	if a.began == 0 || !a.has(volume) || volume.UID != "by hand" || place.NodeOfVolume(volume) != on || !a.publishes(on) {
		a.Errorf("the PersistentVolume is %+v, and the nodes have %+v: %s", volume, a.records, a.says("m"))
	}
	a.wantNothingLeft()
}

// leads says whether the PersistentVolume was replaced, and leads to a node.
func (h *harness) leads(to string) bool {
	h.Helper()
	volume := volumeOf("pv")
	return h.has(volume) && volume.Annotations[movedBy] != "" && place.NodeOfVolume(volume) == to && volume.Annotations[reclaimPolicy] == ""
}

// What an administrator removes, to make it anew for the target since the source has lost the volume, is not made for the source before that.
func TestTargetRecoveredSlowly(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	by := administrator{harness: h}
	undoing := 0
	h.run("m", func(look int) {
		m := h.move("m")
		switch {
		case m.Status.Phase == v1alpha1.Switching && m.DeletionTimestamp == nil:
			delete(h.records, nodeA)
			deleteMove(h)
		case m.Status.Phase == v1alpha1.Undoing && undoing == 0:
			undoing = look
		case undoing > 0 && look == undoing+long:
			by.removes(look)
		case by.began > 0 && look == by.began+while:
			*h.records[nodeB] = record{moved: "move-m"} // move-in --step=confirm
			by.makes(nodeB, nil)
		}
	})
	by.wantMade(nodeB)
}

// The same on the source, since the target has lost the volume, before the operator has noted that it was moved. The administrator may make the
// PersistentVolume of the one that is there, with its annotations, and be slow or not.
func TestSourceRecoveredAmidSwitch(t *testing.T) {
	for name, takes := range map[string]int{"slowly": while, "at once": 0} {
		for of, annotations := range map[string]map[string]string{"of the first": nil, "of the last": {movedBy: "move-m"}} {
			t.Run(name+" "+of, func(t *testing.T) {
				h := newHarness(t, moveOf("m"), appPod("data-0", false))
				by := administrator{harness: h}
				h.run("m", func(look int) {
					if by.began == 0 && h.move("m").Status.Phase == v1alpha1.Switching && h.leads(nodeB) {
						delete(h.records, nodeB)
						by.removes(look)
					}
					if by.began > 0 && look == by.began+takes {
						*h.records[nodeA] = record{} // move-out --step=undo --target-aborted
						by.makes(nodeA, annotations)
					}
				})
				if m := h.move("m"); m.Status.Phase != v1alpha1.Failed || !strings.Contains(h.says("m"), "node node-a again") {
					t.Errorf("the move is %s, and says %q", m.Status.Phase, h.says("m"))
				}
				by.wantMade(nodeA)
			})
		}
	}
}

// Once the PersistentVolume has led to the target, pods may have written there: the source does not take its place, though that object is removed
// by hand and the target gone before the operator has noted it.
func TestTargetIsGoneAfterItWasUsed(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	by := administrator{harness: h}
	waited := false
	h.run("m", func(look int) {
		switch {
		case by.began == 0 && h.move("m").Status.Phase == v1alpha1.Switching && h.leads(nodeB):
			by.removes(look)
			h.goes(nodeB)
		case by.began > 0 && look == by.began+long:
			waited = h.records[nodeA] != nil && !h.records[nodeA].publishes() && !h.has(volumeOf("pv"))
			must.Succeed(t, h.api.Delete(t.Context(), claimOf("data")))
		}
	})
	if by.began == 0 || !waited {
		t.Errorf("tested: %v; the source has %+v, and the move is %s: %s", by.began > 0, h.records[nodeA], h.move("m").Status.Phase, h.says("m"))
	}
	h.wantNothingLeft()
}

// A PersistentVolume that was put back and then deleted with its claim is not made again, as long as the move waits for its target.
func TestPutBackIsDeletedWithItsClaim(t *testing.T) {
	for _, policy := range []corev1.PersistentVolumeReclaimPolicy{corev1.PersistentVolumeReclaimRetain, corev1.PersistentVolumeReclaimDelete} {
		t.Run(string(policy), func(t *testing.T) {
			h := newHarness(t, moveOf("m"), appPod("data-0", false))
			change(volumeOf("pv"), func(v *corev1.PersistentVolume) { v.Spec.PersistentVolumeReclaimPolicy = policy })(h)
			by := administrator{harness: h}
			undoing := 0
			h.run("m", func(look int) {
				m := h.move("m")
				switch {
				case m.Status.Phase == v1alpha1.Switching && m.DeletionTimestamp == nil:
					h.hangs = nodeB
					deleteMove(h)
				case m.Status.Phase == v1alpha1.Undoing && undoing == 0:
					undoing = look
				case undoing > 0 && look == undoing+long:
					by.removes(look)
					must.Succeed(t, h.api.Delete(t.Context(), claimOf("data")))
				case by.began > 0 && look == by.began+while:
					if h.has(volumeOf("pv")) {
						t.Error("the PersistentVolume was made again")
					}
					h.hangs = ""
				}
			})
			if by.began == 0 || h.has(volumeOf("pv")) || h.records[nodeB] != nil {
				t.Errorf("the nodes have %+v", h.records)
			}
			h.wantNothingLeft()
		})
	}
}

// What another claim has by now is wanted as much as by the one before, whose deletion does not remove the last copy while the target, which may
// have lost the volume, does not answer.
func TestVolumeGoesToAnotherClaimWhileTargetIsAway(t *testing.T) {
	for name, anew := range map[string]string{"with its PersistentVolume": "pv", "with another PersistentVolume": "pv-2"} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, moveOf("m"), appPod("data-0", false))
			by := administrator{harness: h}
			h.run("m", func(look int) {
				switch {
				case by.began == 0 && h.move("m").Status.Phase == v1alpha1.Removing:
					h.goes(nodeB)
					before := volumeOf("pv")
					h.has(before)
					by.removes(look)
					must.Succeed(t, h.api.Delete(t.Context(), claimOf("data")))
					volume := before.DeepCopy()
					volume.Name, volume.ResourceVersion = anew, ""
					volume.Spec.ClaimRef = &corev1.ObjectReference{Namespace: space, Name: "data-2", UID: "claim data-2"}
					must.Succeed(t, h.api.Create(t.Context(), volume))
				case by.began > 0 && look == by.began+long:
					if h.records[nodeA] == nil {
						t.Errorf("the last copy is gone, and the move says %q", h.says("m"))
					}
					h.comes(nodeB)
				}
			})
			if by.began == 0 || h.looked < by.began+long || h.records[nodeA] != nil || !h.records[nodeB].publishes() {
				t.Errorf("the nodes have %+v", h.records)
			}
			h.wantNothingLeft()
		})
	}
}
