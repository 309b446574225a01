package move

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestMove(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	w.run("m")
	w.wantOn(nodeB)
	m := w.move("m")
	if s := m.Status; s.Phase != v1alpha1.Succeeded || s.Passes != 2 || s.Standstill == nil || s.Standstill.Seconds == nil || s.SourceNode != nodeA || s.TargetNode != nodeB {
		t.Errorf("the status is %+v", s)
	}
	if !strings.Contains(w.says("m"), "moved from node node-a to node node-b") {
		t.Errorf("it says %q", w.says("m"))
	}
}

// Without Evict a move waits for the pods, and says which.
func TestMoveWaitsForPods(t *testing.T) {
	w := newWorld(t, moveOf("m", func(m *v1alpha1.VolumeMove) { m.Spec.When = v1alpha1.WhenUnpublished }), appPod("data-0", false))
	w.replicas = false
	w.run("m", func(look int) {
		if look < 30 {
			return
		}
		if pod := appPod("data-0", false); w.has(pod) {
			if said := w.says("m"); !strings.Contains(said, "pod data-0") || w.move("m").Status.Phase != v1alpha1.Fenced {
				t.Fatalf("it says %q in the phase %s", said, w.move("m").Status.Phase)
			}
			must.Succeed(t, w.api.Delete(t.Context(), pod))
		}
	})
	w.wantOn(nodeB)
}

// However many writes an operator has made before it is killed, and whether the last was made or not, the next one goes on.
func TestKilledAtAnyWrite(t *testing.T) {
	for name, after := range map[string]bool{"before the write": false, "after the write": true} {
		t.Run(name, func(t *testing.T) {
			for kill := 1; ; kill += every() {
				w := newWorld(t, moveOf("m"), appPod("data-0", false))
				w.kill, w.after = kill, after
				w.run("m")
				w.wantOn(nodeB)
				if t.Failed() {
					t.Fatalf("killed at write %d", kill)
				}
				if !w.killed {
					if kill < 20 {
						t.Errorf("a move makes %d writes: nothing was tested", kill)
					}
					return
				}
			}
		})
	}
}

// eachLook runs a move again and again, with something done at each look in turn.
func eachLook(t *testing.T, do func(w *world), check func(w *world)) {
	t.Helper()
	for at := 0; ; at += every() {
		w := newWorld(t, moveOf("m"), appPod("data-0", false))
		done := false
		w.run("m", func(look int) {
			if look == at {
				do(w)
				done = true
			}
		})
		check(w)
		if t.Failed() {
			t.Fatalf("at look %d", at)
		}
		if !done {
			if at < 10 {
				t.Errorf("a move takes %d looks: nothing was tested", at)
			}
			return
		}
	}
}

// Until the switch a VolumeMove that is deleted undoes the move, and after it completes it.
func TestDeletedAtAnyStep(t *testing.T) {
	undone, completed := 0, 0
	eachLook(t, func(w *world) {
		must.Succeed(w, client.IgnoreNotFound(w.api.Delete(w.Context(), moveOf("m"))))
	}, func(w *world) {
		switch {
		case w.records[nodeA] != nil:
			undone++
			w.wantOn(nodeA)
		default:
			completed++
			w.wantOn(nodeB)
		}
	})
	if undone == 0 || completed == 0 {
		t.Errorf("%d moves were undone, and %d completed", undone, completed)
	}
}

// The operator is killed at any write while it undoes.
func TestKilledWhileUndoing(t *testing.T) {
	for _, from := range []int{4, 6, 8} {
		for kill := 1; ; kill += every() {
			w := newWorld(t, moveOf("m"), appPod("data-0", false))
			w.keeps = true
			w.run("m", func(look int) {
				if look == from {
					must.Succeed(t, w.api.Delete(t.Context(), moveOf("m")))
					w.kill = w.writes + kill
				}
			})
			w.wantOn(nodeA)
			if t.Failed() {
				t.Fatalf("deleted at look %d, killed at write %d", from, kill)
			}
			if !w.killed {
				break
			}
		}
	}
}

// A claim that is deleted takes its volume with it, wherever that is then.
func TestClaimDeletedAtAnyStep(t *testing.T) {
	eachLook(t, func(w *world) {
		w.replicas = false
		must.Succeed(w, client.IgnoreNotFound(w.api.Delete(w.Context(), appPod("data-0", false))))
		must.Succeed(w, w.api.Delete(w.Context(), claimOf("data")))
		if w.move("m").Status.Phase == "" { // it would wait for a claim of the name
			must.Succeed(w, w.api.Delete(w.Context(), moveOf("m")))
		}
	}, func(w *world) {
		w.wantNothingLeft()
		volume := volumeOf("pv")
		if !w.has(volume) || volume.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
			w.Fatalf("the PersistentVolume is %+v", volume)
		}
		if at := place.NodeOfVolume(volume); len(w.records) != 1 || w.records[at] == nil || !w.records[at].publishes() {
			w.Errorf("the volume is on %s; the nodes have %+v", at, w.records)
		}
	})
}

// An operator that was held up before a write, and makes that after another one has taken over and the move has ended, changes nothing of
// how it ended.
func TestWriteThatComesLate(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		for _, policy := range []corev1.PersistentVolumeReclaimPolicy{corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRetain} {
			for at, late := 1, true; late; at += every() {
				w := newWorld(t, moveOf("m"), appPod("data-0", false))
				volume := volumeOf("pv")
				w.has(volume)
				volume.Spec.PersistentVolumeReclaimPolicy = policy
				w.update(volume)
				late = false
				w.pause, w.between = at, func() {
					late = true
					if m := w.move("m"); deleted && m != nil && m.DeletionTimestamp == nil {
						deleteMove(w)
					}
					w.run("m")
				}
				w.run("m")
				w.live()
				w.live()
				on := nodeA
				if w.records[nodeA] == nil {
					on = nodeB
				}
				w.has(volume)
				if place.NodeOfVolume(volume) != on || volume.Spec.PersistentVolumeReclaimPolicy != policy || volume.DeletionTimestamp != nil || volume.Annotations[reclaimPolicy] != "" {
					t.Errorf("write %d comes late (the VolumeMove is deleted: %v): the nodes have %+v, and the PersistentVolume is %+v", at, deleted, w.records, volume)
				}
			}
		}
	}
}

// A read that fails at any time shows nothing of what it was about.
func TestReadFailsAtAnyTime(t *testing.T) {
	for on, meanwhile := range map[string]func(w *world){
		nodeB: func(*world) {},
		nodeA: func(w *world) {
			if m := w.move("m"); m.Status.Phase == v1alpha1.Switching && m.DeletionTimestamp == nil {
				deleteMove(w)
			}
		},
	} {
		reads := []string{""}
		for i := 0; i < len(reads); i += every() {
			w := newWorld(t, moveOf("m"), appPod("data-0", false))
			w.fail = reads[i]
			w.run("m", func(int) { meanwhile(w) })
			w.wantOn(on)
			if t.Failed() {
				t.Fatalf("it fails to %s", reads[i])
			}
			if i == 0 {
				reads = append(reads, w.reads...)
			}
		}
		if len(reads) < 40 {
			t.Errorf("a move reads only %q", reads)
		}
	}
}

// Movers that are deleted at any time are made again.
func TestMoverDeletedAtAnyStep(t *testing.T) {
	for _, of := range []role{roleOut, roleIn, roleConfirm, roleVouch, roleRemove} {
		eachLook(t, func(w *world) {
			pods := &corev1.PodList{}
			must.Succeed(w, w.api.List(w.Context(), pods, client.InNamespace(storage), client.MatchingLabels{roleLabel: string(of)}))
			for i := range pods.Items {
				delete(w.logs, pods.Items[i].Name)
				must.Succeed(w, w.api.Delete(w.Context(), &pods.Items[i]))
			}
		}, func(w *world) { w.wantOn(nodeB) })
	}
}

// A size that csi-resizer writes at any time is that of the volume afterwards.
func TestGrowthAtAnyStep(t *testing.T) {
	size := resource.MustParse("20Gi")
	grow := func(w *world) {
		if volume := volumeOf("pv"); w.has(volume) {
			volume.Spec.Capacity[corev1.ResourceStorage] = size
			metav1.SetMetaDataAnnotation(&volume.ObjectMeta, preResize, "10Gi")
			w.update(volume)
			w.keeps = false
		}
	}
	for at := 0; at < 40; at += 2 * every() {
		w := newWorld(t, moveOf("m"), appPod("data-0", false))
		grown := false
		w.run("m", func(look int) {
			if look >= at && !grown && w.has(volumeOf("pv")) {
				grow(w)
				grown = true
			}
		})
		w.wantOn(nodeB)
		volume := volumeOf("pv")
		if w.has(volume); grown && volume.Spec.Capacity.Storage().Cmp(size) != 0 {
			t.Fatalf("grown at look %d, the volume has %s", at, volume.Spec.Capacity.Storage())
		}
	}
}

// There and back.
func TestMoveBack(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	w.run("m")
	w.wantOn(nodeB)
	// The names of the stand-in's nodes change their places.
	w.records[nodeA], w.records[nodeB] = w.records[nodeB], nil
	delete(w.records, nodeB)
	volume := volumeOf("pv")
	w.has(volume)
	volume.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Values = []string{nodeA}
	w.update(volume)
	pod := appPod("data-0", false)
	must.Succeed(t, w.api.Delete(t.Context(), pod))
	w.schedule()
	must.Succeed(t, w.api.Create(t.Context(), moveOf("again", later)))
	w.run("again")
	w.wantOn(nodeB)
}

// A target that does not answer keeps no pod from the source after the move was undone.
func TestUndoWithoutTarget(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	w.keeps = true
	for range 12 {
		w.reconcile("m")
		w.live()
	}
	if w.records[nodeA].role != "source" {
		t.Fatal("the source is not fenced")
	}
	down := node(nodeB)
	w.has(down)
	down.Status.Conditions[0].Status = corev1.ConditionUnknown
	w.update(down)
	must.Succeed(t, w.api.Delete(t.Context(), moveOf("m")))
	for range 5 {
		w.reconcile("m")
		pods := &corev1.PodList{}
		must.Succeed(t, w.api.List(t.Context(), pods, client.MatchingLabels{roleLabel: string(roleUndo)}))
		for i := range pods.Items {
			w.mover(&pods.Items[i], nil)
		}
	}
	if !w.records[nodeA].publishes() || w.records[nodeB] == nil {
		t.Errorf("the nodes have %+v", w.records)
	}
	w.run("m")
	w.wantOn(nodeA)
}

// A last pass that takes long fills what is read of the mover's log, and pods stand still all the same.
func TestLongLastPass(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	said := ""
	w.run("m", func(int) {
		pod := w.moverOf(roleOut)
		if said != "" || pod == nil || !strings.Contains(w.logs[pod.Name], `"unused"`) {
			return
		}
		w.reconcile("m")
		w.logs[pod.Name] = "{\"event\":\"passing\",\"bytes\":1}\n"
		w.reconcile("m")
		said = w.says("m")
	})
	if !strings.Contains(said, "no pod uses the volume any more") {
		t.Errorf("it says %q", said)
	}
	w.wantOn(nodeB)
}
