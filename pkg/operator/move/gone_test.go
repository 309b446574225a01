package move

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// long is after how many looks a move that has not ended waits for something that does not come.
const long = 25

// A target that is given up at any step, and may come back later, costs nothing: the volume is used on the source again, unless pods may
// have written to the target. Then the source keeps what it had until the target is there.
func TestTargetIsGoneAtAnyStep(t *testing.T) {
	waited := map[v1alpha1.Phase]int{}
	backs := []int{1, 3, long}
	if testing.Short() {
		backs = backs[1:]
	}
	for _, back := range backs {
		for at, done := 1, true; done; at += every() {
			h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
			done = false
			h.run("m", func(look int) {
				switch look {
				case at:
					h.goes(nodeB)
					done = true
				case at + back:
					if back == long {
						waited[h.move("m").Status.Phase]++
						h.wantWaitsForTarget()
					}
					h.comes(nodeB)
				}
			})
			h.wantWhole()
			if t.Failed() {
				t.Fatalf("the target goes at look %d, and comes back %d later", at, back)
			}
		}
	}
	if !testing.Short() && waited[v1alpha1.Removing] == 0 {
		t.Errorf("moves have waited in the phases %v: nothing was tested", waited)
	}
}

// wantWaitsForTarget expects a move that cannot end without its target to say so, and the source to keep what it has.
func (h *harness) wantWaitsForTarget() {
	h.Helper()
	if own := h.records[nodeA]; own == nil || h.move("m").Status.Phase != v1alpha1.Removing || !strings.Contains(h.says("m"), "node node-b is gone") {
		h.Errorf("in the phase %s the source has %+v, and the move says %q", h.move("m").Status.Phase, own, h.says("m"))
	}
}

// wantWhole expects the volume where its object is, and that what was left elsewhere is said, with what removes it.
func (h *harness) wantWhole() {
	h.Helper()
	on, other, remove := nodeA, nodeB, "move-in --step=abort --even-confirmed"
	if h.move("m").Status.Phase != v1alpha1.Failed {
		on, other, remove = nodeB, nodeA, "move-out --step=remove"
	}
	if left := h.records[other]; left != nil {
		if !strings.Contains(h.says("m"), "if node "+other+" comes back") || !strings.Contains(h.says("m"), remove) {
			h.Errorf("node %s has %+v, and the move says %q", other, left, h.says("m"))
		}
		delete(h.records, other)
	}
	if !h.has(node(on)) {
		h.comes(on)
	}
	h.wantOn(on)
}

// A source that goes at any step before the switch has the move wait for it, and after that it is not needed.
func TestSourceIsGoneAtAnyStep(t *testing.T) {
	waited := map[v1alpha1.Phase]int{}
	for at, done := 1, true; done; at += every() {
		h := newHarness(t, moveOf("m"), appPod("data-0", false))
		done = false
		h.run("m", func(look int) {
			switch look {
			case at:
				h.goes(nodeA)
				done = true
			case at + long:
				waited[h.move("m").Status.Phase]++
				if h.records[nodeA] == nil || !strings.Contains(h.says("m"), "node node-a is gone") {
					t.Errorf("the source has %+v, and the move says %q", h.records[nodeA], h.says("m"))
				}
				h.comes(nodeA)
			}
		})
		h.wantWhole()
		if t.Failed() {
			t.Fatalf("the source goes at look %d", at)
		}
	}
	if waited[v1alpha1.Copying] == 0 || !testing.Short() && waited[v1alpha1.Fenced] == 0 {
		t.Errorf("moves have waited in the phases %v: nothing was tested", waited)
	}
}

// The fence of a source that is gone is not forgotten: a move that is undone waits for the node, and if the claim is deleted instead it says
// what is left.
func TestUndoWithoutSource(t *testing.T) {
	for name, claimGoes := range map[string]bool{"the node comes back": false, "the claim is deleted": true} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, moveOf("m"), appPod("data-0", false))
			h.keeps = true
			for range 12 {
				h.reconcile("m")
				h.live()
			}
			h.goes(nodeA)
			if !claimGoes {
				must.Succeed(t, h.api.Delete(t.Context(), moveOf("m")))
			}
			for range long {
				h.reconcile("m")
				h.live()
			}
			if m := h.move("m"); m == nil || h.records[nodeA].role != "source" || h.records[nodeB] == nil || !strings.Contains(h.says("m"), "node node-a is gone") {
				t.Fatalf("the nodes have %+v, and the move says %q", h.records, h.says("m"))
			}
			if !claimGoes {
				h.comes(nodeA)
				h.run("m")
				h.wantOn(nodeA)
				return
			}
			h.replicas = false
			must.Succeed(t, h.api.Delete(t.Context(), claimOf("data")))
			h.run("m")
			if !strings.Contains(h.says("m"), "if node node-a comes back") || h.records[nodeB] != nil {
				t.Errorf("it says %q, and the target has %+v", h.says("m"), h.records[nodeB])
			}
			h.wantNothingLeft()
		})
	}
}

// A node that was set up anew under its name shows nothing by what it answered before that, of which an operator that was down hears late.
func TestAnswersOfNodeSetUpAnew(t *testing.T) {
	for asked, c := range map[role]struct{ on, other string }{roleAssure: {nodeB, nodeA}, roleUndo: {nodeA, nodeB}} {
		h := newHarness(t, moveOf("m"), appPod("data-0", false))
		at := 0
		h.run("m", func(look int) {
			pod := &corev1.Pod{ObjectMeta: madeFor("m").meta("-" + string(asked))}
			switch {
			case asked == roleUndo && h.move("m").Status.Phase == v1alpha1.Switching && h.move("m").DeletionTimestamp == nil:
				deleteMove(h)
			case asked == roleAssure && h.move("m").Status.Phase == v1alpha1.Removing && h.has(node(nodeA)):
				h.goes(nodeA) // with it here, it asks by itself
			case at == 0 && h.has(pod) && pod.Status.Phase == corev1.PodSucceeded:
				at = look
				delete(h.records, c.on)
				h.bootAnew(c.on)
			case at > 0 && look == at+long:
				if h.records[c.other] == nil {
					t.Errorf("%s: the last copy is gone, and the move says %q", asked, h.says("m"))
				}
				h.replicas = false
				must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))), h.api.Delete(t.Context(), claimOf("data")))
			}
		})
		if at == 0 || h.looked < at+long {
			t.Errorf("%s: the move has ended without an answer: %v", asked, h.records)
		}
	}
}

// bootAnew has a node be started anew, and answer.
func (h *harness) bootAnew(name string) {
	h.Helper()
	anew := node(name)
	h.has(anew)
	anew.Status.NodeInfo.BootID += "another"
	h.update(anew)
}

// A source that starts a removal late, after it was cut off, as the operator was down, removes nothing by what the target had before.
func TestRemovalThatStartsLate(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	at := 0
	h.run("m", func(look int) {
		switch {
		case at == 0 && h.move("m").Status.Phase == v1alpha1.Removing:
			if h.hangs = nodeA; h.moverOf(roleRemove) == nil { // the mover is not started
				return
			}
			at, h.hangs = look, ""
			delete(h.records, nodeB)
			h.live()
		case at > 0 && look == at+long:
			if h.records[nodeA] == nil {
				t.Errorf("the last copy is gone, and the move says %q", h.says("m"))
			}
			h.replicas = false
			must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))), h.api.Delete(t.Context(), claimOf("data")))
		}
	})
	if at == 0 || h.looked < at+long {
		t.Errorf("the move has ended without an answer: %v", h.records)
	}
}

// A target that starts late to remove its copy of a move that was undone, after it was cut off, as the operator was down, keeps it as long as the
// source, which may have been set up anew by then, does not say that it has the volume.
func TestAbortThatStartsLate(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	at := 0
	h.run("m", func(look int) {
		m := h.move("m")
		switch {
		case at == 0 && m.Status.Phase == v1alpha1.Switching && m.DeletionTimestamp == nil:
			deleteMove(h)
		case at == 0 && m.Status.Phase == v1alpha1.Undoing:
			if h.hangs = nodeB; h.moverOf(roleAbortUndone) == nil { // the mover is not started
				return
			}
			at, h.hangs = look, ""
			delete(h.records, nodeA)
			h.live()
		case at > 0 && look == at+long:
			if h.records[nodeB] == nil || !strings.Contains(h.says("m"), "node node-a has the volume") {
				t.Errorf("node-b has %+v, and the move says %q", h.records[nodeB], h.says("m"))
			}
			h.replicas = false
			must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))), h.api.Delete(t.Context(), claimOf("data")))
		}
	})
	if at == 0 || h.looked < at+long {
		t.Errorf("the move has ended without an answer: %v", h.records)
	}
	h.wantNothingLeft()
}

// Where an administrator has the volume be used on the target, since the source has lost it, undoing ends, and touches nothing.
func TestTargetRecoveredByHand(t *testing.T) {
	for name, anew := range map[string]string{"under its name": "pv", "under another name": "pv-2"} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, moveOf("m"), appPod("data-0", false))
			at := 0
			h.run("m", func(look int) {
				m := h.move("m")
				switch {
				case at == 0 && m.Status.Phase == v1alpha1.Switching:
					at = look
					delete(h.records, nodeA)
					deleteMove(h)
				case at > 0 && look == at+long:
					h.replicas = false
					volume := volumeOf("pv")
					h.has(volume)
					volume.Finalizers = nil
					h.update(volume)
					must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))), h.api.Delete(t.Context(), volume))
					*h.records[nodeB] = record{moved: "move-m"} // move-in --step=confirm
					volume = volumeOf(anew)
					volume.UID, volume.Spec.NodeAffinity = "by hand", onNode(nodeB)
					must.Succeed(t, h.api.Create(t.Context(), volume))
				}
			})
			if at == 0 || h.looked < at+long || !h.records[nodeB].publishes() {
				t.Errorf("the nodes have %+v", h.records)
			}
			h.wantNothingLeft()
		})
	}
}

// An administrator who has the volume be used on the target by another claim may delete the one before, and its PersistentVolume, which leads to
// nothing: what another PersistentVolume leads to is not removed with them.
func TestTargetRecoveredForAnotherClaim(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	at := 0
	h.run("m", func(look int) {
		switch {
		case at == 0 && h.move("m").Status.Phase == v1alpha1.Switching:
			at = look
			delete(h.records, nodeA)
			deleteMove(h)
		case at > 0 && look == at+long:
			*h.records[nodeB] = record{moved: "move-m"} // move-in --step=confirm
			anew := volumeOf("pv-2")
			anew.UID, anew.Spec.NodeAffinity = "by hand", onNode(nodeB)
			anew.Spec.ClaimRef = &corev1.ObjectReference{Namespace: space, Name: "data-2", UID: "claim data-2"}
			h.replicas = false
			must.Succeed(t, h.api.Create(t.Context(), anew))
			must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))), h.api.Delete(t.Context(), claimOf("data")))
		}
	})
	if at == 0 || h.looked < at+long || !h.records[nodeB].publishes() {
		t.Errorf("the nodes have %+v", h.records)
	}
	h.wantNothingLeft()
}

// An administrator makes the PersistentVolume for the target of the one that was put back, with all its annotations.
func TestTargetRecoveredByWhatWasPutBack(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	at := 0
	h.run("m", func(look int) {
		m := h.move("m")
		switch {
		case at == 0 && m.Status.Phase == v1alpha1.Switching && !h.has(volumeOf("pv")) && h.has(node(nodeB)):
			h.goes(nodeB)
		case at == 0 && m.Status.Phase == v1alpha1.Undoing:
			at = look
			delete(h.records, nodeA)
			h.comes(nodeB)
		case at > 0 && look == at+long:
			h.replicas = false
			volume := volumeOf("pv")
			h.has(volume)
			anew := volume.DeepCopy()
			volume.Finalizers = nil
			h.update(volume)
			must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))), h.api.Delete(t.Context(), volume))
			*h.records[nodeB] = record{moved: "move-m"} // move-in --step=confirm
			anew.UID, anew.ResourceVersion, anew.Spec.NodeAffinity = "by hand", "", onNode(nodeB)
			must.Succeed(t, h.api.Create(t.Context(), anew))
		}
	})
	volume := volumeOf("pv")
	if at == 0 || h.looked < at+long || !h.records[nodeB].publishes() || !h.has(volume) || volume.UID != "by hand" {
		t.Errorf("the nodes have %+v, and the PersistentVolume is %+v", h.records, volume)
	}
	h.wantNothingLeft()
}

// Where an administrator has the volume be used on the source again, since the target has lost it, the move ends, and touches nothing.
func TestRecoveredByHand(t *testing.T) {
	for name, anew := range map[string]string{"under its name": "pv", "under another name": "pv-2"} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, moveOf("m"), appPod("data-0", false))
			at := 0
			h.run("m", func(look int) {
				switch {
				case at == 0 && h.move("m").Status.Phase == v1alpha1.Removing:
					at = look
					delete(h.records, nodeB)
				case at > 0 && look == at+long:
					h.replicas = false
					volume := volumeOf("pv")
					h.has(volume)
					volume.Finalizers = nil
					h.update(volume)
					must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))), h.api.Delete(t.Context(), volume))
					*h.records[nodeA] = record{} // move-out --step=undo --target-aborted
					volume = volumeOf(anew)
					volume.UID = "by hand"
					must.Succeed(t, h.api.Create(t.Context(), volume))
				}
			})
			if m := h.move("m"); at == 0 || m.Status.Phase != v1alpha1.Failed || !strings.Contains(h.says("m"), "node node-a again") || !h.records[nodeA].publishes() {
				t.Errorf("the move is %s, says %q, and the nodes have %+v", m.Status.Phase, h.says("m"), h.records)
			}
			h.wantNothingLeft()
		})
	}
}

// A source that does not answer has no other copy be removed.
func TestNoCopyIsRemovedWithoutSource(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	h.run("m", func(look int) {
		m := h.move("m")
		switch {
		case m != nil && m.Status.Phase == v1alpha1.Switching && len(h.wasGone) == 0:
			h.goes(nodeB)
			h.goes(nodeA)
		case look == long:
			h.comes(nodeB)
		case look == 2*long:
			if h.records[nodeB] == nil {
				t.Error("the only copy on a node that answers is gone")
			}
			if !h.has(node(nodeA)) {
				h.comes(nodeA)
			}
		}
	})
	h.wantWhole()
}

// What a move has made in the driver's namespace may be deleted by hand at any time, or all the time.
func TestOwnObjectsDeletedAtAnyStep(t *testing.T) {
	remove := func(h *harness) {
		meta := madeFor("m").meta("")
		for _, object := range []client.Object{&corev1.Secret{ObjectMeta: meta}, &networkingv1.NetworkPolicy{ObjectMeta: meta}} {
			must.Succeed(h, client.IgnoreNotFound(h.api.Delete(h.Context(), object)))
		}
	}
	eachLook(t, remove, func(h *harness) { h.wantOn(nodeB) })
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	h.run("m", func(int) { remove(h) })
	h.wantOn(nodeB)
}

// Without what replaces the PersistentVolume, which only force can remove, the move says what has to be made.
func TestSecretRemovedByForce(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	removed := false
	h.run("m", func(look int) {
		volume := volumeOf("pv")
		switch there := h.has(volume); {
		case !there && !removed:
			secret := &corev1.Secret{ObjectMeta: madeFor("m").meta("")}
			h.has(secret)
			secret.Finalizers = nil
			h.update(secret)
			must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), secret)))
			removed = true
		case !there && look > long:
			said := h.says("m")
			for _, needed := range []string{"PersistentVolume pv", "volume pvc-1", "node node-b", movedBy + ": move-m"} {
				if !strings.Contains(said, needed) {
					t.Fatalf("it says %q, without %q", said, needed)
				}
			}
			volume = volumeOf("pv")
			volume.UID, volume.Spec.NodeAffinity = "by hand", onNode(nodeB)
			volume.Annotations[movedBy] = "move-m"
			must.Succeed(t, h.api.Create(t.Context(), volume))
		}
	})
	if !removed {
		t.Error("nothing was tested")
	}
	h.wantOn(nodeB)
}

// A pod that is deleted at any time comes back, and is where the volume is in the end.
func TestPodDeletedAtAnyStep(t *testing.T) {
	eachLook(t, func(h *harness) {
		must.Succeed(h, client.IgnoreNotFound(h.api.Delete(h.Context(), appPod("data-0", false))))
	}, func(h *harness) {
		volume := volumeOf("pv")
		if h.has(volume); place.NodeOfVolume(volume) != nodeB {
			h.Errorf("the volume is on %s", place.NodeOfVolume(volume))
		}
		h.wantOn(nodeB)
	})
}

// A claim that has the name of one that was deleted amid a move is another: its pods are left alone.
func TestPodsOfAnotherClaim(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	another := func() *corev1.PersistentVolumeClaim {
		claim := claimOf("data")
		claim.UID, claim.Spec.VolumeName = "another claim", "another volume"
		return claim
	}
	at := 0
	h.run("m", func(look int) {
		if at > 0 || h.move("m").Status.Phase != v1alpha1.Removing {
			return
		}
		at = look
		h.replicas = false
		must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))), h.api.Delete(t.Context(), claimOf("data")))
		must.Succeed(t, h.api.Create(t.Context(), another()), h.api.Create(t.Context(), appPod("another", false)))
		h.evicted = 0
	})
	if at == 0 || h.evicted > 0 || !h.has(appPod("another", false)) {
		t.Errorf("at look %d a pod of another claim was evicted %d times", at, h.evicted)
	}
}
