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
			w := newWorld(t, moveOf("m", to(nodeB)), appPod("data-0", false))
			done = false
			w.run("m", func(look int) {
				switch look {
				case at:
					w.goes(nodeB)
					done = true
				case at + back:
					if back == long {
						waited[w.move("m").Status.Phase]++
						w.wantWaitsForTarget()
					}
					w.comes(nodeB)
				}
			})
			w.wantWhole()
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
func (w *world) wantWaitsForTarget() {
	w.Helper()
	if own := w.records[nodeA]; own == nil || w.move("m").Status.Phase != v1alpha1.Removing || !strings.Contains(w.says("m"), "node node-b is gone") {
		w.Errorf("in the phase %s the source has %+v, and the move says %q", w.move("m").Status.Phase, own, w.says("m"))
	}
}

// wantWhole expects the volume where its object is, and that what was left elsewhere is said, with what removes it.
func (w *world) wantWhole() {
	w.Helper()
	on, other, remove := nodeA, nodeB, "move-in --step=abort --even-confirmed"
	if w.move("m").Status.Phase != v1alpha1.Failed {
		on, other, remove = nodeB, nodeA, "move-out --step=remove"
	}
	if left := w.records[other]; left != nil {
		if !strings.Contains(w.says("m"), "if node "+other+" comes back") || !strings.Contains(w.says("m"), remove) {
			w.Errorf("node %s has %+v, and the move says %q", other, left, w.says("m"))
		}
		delete(w.records, other)
	}
	if !w.has(node(on)) {
		w.comes(on)
	}
	w.wantOn(on)
}

// A source that goes at any step before the switch has the move wait for it, and after that it is not needed.
func TestSourceIsGoneAtAnyStep(t *testing.T) {
	waited := map[v1alpha1.Phase]int{}
	for at, done := 1, true; done; at += every() {
		w := newWorld(t, moveOf("m"), appPod("data-0", false))
		done = false
		w.run("m", func(look int) {
			switch look {
			case at:
				w.goes(nodeA)
				done = true
			case at + long:
				waited[w.move("m").Status.Phase]++
				if w.records[nodeA] == nil || !strings.Contains(w.says("m"), "node node-a is gone") {
					t.Errorf("the source has %+v, and the move says %q", w.records[nodeA], w.says("m"))
				}
				w.comes(nodeA)
			}
		})
		w.wantWhole()
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
			w := newWorld(t, moveOf("m"), appPod("data-0", false))
			w.keeps = true
			for range 12 {
				w.reconcile("m")
				w.live()
			}
			w.goes(nodeA)
			if !claimGoes {
				must.Succeed(t, w.api.Delete(t.Context(), moveOf("m")))
			}
			for range long {
				w.reconcile("m")
				w.live()
			}
			if m := w.move("m"); m == nil || w.records[nodeA].role != "source" || w.records[nodeB] == nil || !strings.Contains(w.says("m"), "node node-a is gone") {
				t.Fatalf("the nodes have %+v, and the move says %q", w.records, w.says("m"))
			}
			if !claimGoes {
				w.comes(nodeA)
				w.run("m")
				w.wantOn(nodeA)
				return
			}
			w.replicas = false
			must.Succeed(t, w.api.Delete(t.Context(), claimOf("data")))
			w.run("m")
			if !strings.Contains(w.says("m"), "if node node-a comes back") || w.records[nodeB] != nil {
				t.Errorf("it says %q, and the target has %+v", w.says("m"), w.records[nodeB])
			}
			w.wantNothingLeft()
		})
	}
}

// A node that was set up anew under its name shows nothing by what it answered before that, of which an operator that was down hears late.
func TestAnswersOfNodeSetUpAnew(t *testing.T) {
	for asked, c := range map[role]struct{ on, other string }{roleAssure: {nodeB, nodeA}, roleUndo: {nodeA, nodeB}} {
		w := newWorld(t, moveOf("m"), appPod("data-0", false))
		at := 0
		w.run("m", func(look int) {
			pod := &corev1.Pod{ObjectMeta: madeFor("m").meta("-" + string(asked))}
			switch {
			case asked == roleUndo && w.move("m").Status.Phase == v1alpha1.Switching && w.move("m").DeletionTimestamp == nil:
				deleteMove(w)
			case asked == roleAssure && w.move("m").Status.Phase == v1alpha1.Removing && w.has(node(nodeA)):
				w.goes(nodeA) // with it here, it asks by itself
			case at == 0 && w.has(pod) && pod.Status.Phase == corev1.PodSucceeded:
				at = look
				delete(w.records, c.on)
				w.bootAnew(c.on)
			case at > 0 && look == at+long:
				if w.records[c.other] == nil {
					t.Errorf("%s: the last copy is gone, and the move says %q", asked, w.says("m"))
				}
				w.replicas = false
				must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), appPod("data-0", false))), w.api.Delete(t.Context(), claimOf("data")))
			}
		})
		if at == 0 || w.looked < at+long {
			t.Errorf("%s: the move has ended without an answer: %v", asked, w.records)
		}
	}
}

// bootAnew has a node be started anew, and answer.
func (w *world) bootAnew(name string) {
	w.Helper()
	anew := node(name)
	w.has(anew)
	anew.Status.NodeInfo.BootID += "another"
	w.update(anew)
}

// A source that starts a removal late, after it was cut off, as the operator was down, removes nothing by what the target had before.
func TestRemovalThatStartsLate(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	at := 0
	w.run("m", func(look int) {
		switch {
		case at == 0 && w.move("m").Status.Phase == v1alpha1.Removing:
			if w.hangs = nodeA; w.moverOf(roleRemove) == nil { // the mover is not started
				return
			}
			at, w.hangs = look, ""
			delete(w.records, nodeB)
			w.live()
		case at > 0 && look == at+long:
			if w.records[nodeA] == nil {
				t.Errorf("the last copy is gone, and the move says %q", w.says("m"))
			}
			w.replicas = false
			must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), appPod("data-0", false))), w.api.Delete(t.Context(), claimOf("data")))
		}
	})
	if at == 0 || w.looked < at+long {
		t.Errorf("the move has ended without an answer: %v", w.records)
	}
}

// A target that starts late to remove its copy of a move that was undone, after it was cut off, as the operator was down, keeps it as long as the
// source, which may have been set up anew by then, does not say that it has the volume.
func TestAbortThatStartsLate(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	at := 0
	w.run("m", func(look int) {
		m := w.move("m")
		switch {
		case at == 0 && m.Status.Phase == v1alpha1.Switching && m.DeletionTimestamp == nil:
			deleteMove(w)
		case at == 0 && m.Status.Phase == v1alpha1.Undoing:
			if w.hangs = nodeB; w.moverOf(roleAbortUndone) == nil { // the mover is not started
				return
			}
			at, w.hangs = look, ""
			delete(w.records, nodeA)
			w.live()
		case at > 0 && look == at+long:
			if w.records[nodeB] == nil || !strings.Contains(w.says("m"), "node node-a has the volume") {
				t.Errorf("node-b has %+v, and the move says %q", w.records[nodeB], w.says("m"))
			}
			w.replicas = false
			must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), appPod("data-0", false))), w.api.Delete(t.Context(), claimOf("data")))
		}
	})
	if at == 0 || w.looked < at+long {
		t.Errorf("the move has ended without an answer: %v", w.records)
	}
	w.wantNothingLeft()
}

// Where an administrator has the volume be used on the target, since the source has lost it, undoing ends, and touches nothing.
func TestTargetRecoveredByHand(t *testing.T) {
	for name, anew := range map[string]string{"under its name": "pv", "under another name": "pv-2"} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, moveOf("m"), appPod("data-0", false))
			at := 0
			w.run("m", func(look int) {
				m := w.move("m")
				switch {
				case at == 0 && m.Status.Phase == v1alpha1.Switching:
					at = look
					delete(w.records, nodeA)
					deleteMove(w)
				case at > 0 && look == at+long:
					w.replicas = false
					volume := volumeOf("pv")
					w.has(volume)
					volume.Finalizers = nil
					w.update(volume)
					must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), appPod("data-0", false))), w.api.Delete(t.Context(), volume))
					*w.records[nodeB] = record{moved: "move-m"} // move-in --step=confirm
					volume = volumeOf(anew)
					volume.UID, volume.Spec.NodeAffinity = "by hand", onNode(nodeB)
					must.Succeed(t, w.api.Create(t.Context(), volume))
				}
			})
			if at == 0 || w.looked < at+long || !w.records[nodeB].publishes() {
				t.Errorf("the nodes have %+v", w.records)
			}
			w.wantNothingLeft()
		})
	}
}

// Where an administrator has the volume be used on the source again, since the target has lost it, the move ends, and touches nothing.
func TestRecoveredByHand(t *testing.T) {
	for name, anew := range map[string]string{"under its name": "pv", "under another name": "pv-2"} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, moveOf("m"), appPod("data-0", false))
			at := 0
			w.run("m", func(look int) {
				switch {
				case at == 0 && w.move("m").Status.Phase == v1alpha1.Removing:
					at = look
					delete(w.records, nodeB)
				case at > 0 && look == at+long:
					w.replicas = false
					volume := volumeOf("pv")
					w.has(volume)
					volume.Finalizers = nil
					w.update(volume)
					must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), appPod("data-0", false))), w.api.Delete(t.Context(), volume))
					*w.records[nodeA] = record{} // move-out --step=undo --target-aborted
					volume = volumeOf(anew)
					volume.UID = "by hand"
					must.Succeed(t, w.api.Create(t.Context(), volume))
				}
			})
			if m := w.move("m"); at == 0 || m.Status.Phase != v1alpha1.Failed || !strings.Contains(w.says("m"), "node node-a again") || !w.records[nodeA].publishes() {
				t.Errorf("the move is %s, says %q, and the nodes have %+v", m.Status.Phase, w.says("m"), w.records)
			}
			w.wantNothingLeft()
		})
	}
}

// A source that does not answer has no other copy be removed.
func TestNoCopyIsRemovedWithoutSource(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	w.run("m", func(look int) {
		m := w.move("m")
		switch {
		case m != nil && m.Status.Phase == v1alpha1.Switching && len(w.wasGone) == 0:
			w.goes(nodeB)
			w.goes(nodeA)
		case look == long:
			w.comes(nodeB)
		case look == 2*long:
			if w.records[nodeB] == nil {
				t.Error("the only copy on a node that answers is gone")
			}
			if !w.has(node(nodeA)) {
				w.comes(nodeA)
			}
		}
	})
	w.wantWhole()
}

// What a move has made in the driver's namespace may be deleted by hand at any time, or all the time.
func TestOwnObjectsDeletedAtAnyStep(t *testing.T) {
	remove := func(w *world) {
		meta := madeFor("m").meta("")
		for _, object := range []client.Object{&corev1.Secret{ObjectMeta: meta}, &networkingv1.NetworkPolicy{ObjectMeta: meta}} {
			must.Succeed(w, client.IgnoreNotFound(w.api.Delete(w.Context(), object)))
		}
	}
	eachLook(t, remove, func(w *world) { w.wantOn(nodeB) })
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	w.run("m", func(int) { remove(w) })
	w.wantOn(nodeB)
}

// Without what replaces the PersistentVolume, which only force can remove, the move says what has to be made.
func TestSecretRemovedByForce(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	removed := false
	w.run("m", func(look int) {
		volume := volumeOf("pv")
		switch there := w.has(volume); {
		case !there && !removed:
			secret := &corev1.Secret{ObjectMeta: madeFor("m").meta("")}
			w.has(secret)
			secret.Finalizers = nil
			w.update(secret)
			must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), secret)))
			removed = true
		case !there && look > long:
			said := w.says("m")
			for _, needed := range []string{"PersistentVolume pv", "volume pvc-1", "node node-b", movedBy + ": move-m"} {
				if !strings.Contains(said, needed) {
					t.Fatalf("it says %q, without %q", said, needed)
				}
			}
			volume = volumeOf("pv")
			volume.UID, volume.Spec.NodeAffinity = "by hand", onNode(nodeB)
			volume.Annotations[movedBy] = "move-m"
			must.Succeed(t, w.api.Create(t.Context(), volume))
		}
	})
	if !removed {
		t.Error("nothing was tested")
	}
	w.wantOn(nodeB)
}

// A pod that is deleted at any time comes back, and is where the volume is in the end.
func TestPodDeletedAtAnyStep(t *testing.T) {
	eachLook(t, func(w *world) {
		must.Succeed(w, client.IgnoreNotFound(w.api.Delete(w.Context(), appPod("data-0", false))))
	}, func(w *world) {
		volume := volumeOf("pv")
		if w.has(volume); place.NodeOfVolume(volume) != nodeB {
			w.Errorf("the volume is on %s", place.NodeOfVolume(volume))
		}
		w.wantOn(nodeB)
	})
}

// A claim that has the name of one that was deleted amid a move is another: its pods are left alone.
func TestPodsOfAnotherClaim(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	another := func() *corev1.PersistentVolumeClaim {
		claim := claimOf("data")
		claim.UID, claim.Spec.VolumeName = "another claim", "another volume"
		return claim
	}
	at := 0
	w.run("m", func(look int) {
		if at > 0 || w.move("m").Status.Phase != v1alpha1.Removing {
			return
		}
		at = look
		w.replicas = false
		must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), appPod("data-0", false))), w.api.Delete(t.Context(), claimOf("data")))
		must.Succeed(t, w.api.Create(t.Context(), another()), w.api.Create(t.Context(), appPod("another", false)))
		w.evicted = 0
	})
	if at == 0 || w.evicted > 0 || !w.has(appPod("another", false)) {
		t.Errorf("at look %d a pod of another claim was evicted %d times", at, w.evicted)
	}
}
