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
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	h.run("m")
	h.wantOn(nodeB)
	m := h.move("m")
	if s := m.Status; s.Phase != v1alpha1.Succeeded || s.Passes != 2 || s.Standstill == nil || s.Standstill.Seconds == nil || s.SourceNode != nodeA || s.TargetNode != nodeB {
		t.Errorf("the status is %+v", s)
	}
	if !strings.Contains(h.says("m"), "moved from node node-a to node node-b") {
		t.Errorf("it says %q", h.says("m"))
	}
}

// Without Evict a move waits for the pods, and says which.
func TestMoveWaitsForPods(t *testing.T) {
	h := newHarness(t, moveOf("m", func(m *v1alpha1.VolumeMove) { m.Spec.When = v1alpha1.WhenUnpublished }), appPod("data-0", false))
	h.replicas = false
	h.run("m", func(look int) {
		if look < 30 {
			return
		}
		if pod := appPod("data-0", false); h.has(pod) {
			if said := h.says("m"); !strings.Contains(said, "pod data-0") || h.move("m").Status.Phase != v1alpha1.Fenced {
				t.Fatalf("it says %q in the phase %s", said, h.move("m").Status.Phase)
			}
			must.Succeed(t, h.api.Delete(t.Context(), pod))
		}
	})
	h.wantOn(nodeB)
}

// However many writes an operator has made before it is killed, and whether the last was made or not, the next one goes on.
func TestKilledAtAnyWrite(t *testing.T) {
	for name, after := range map[string]bool{"before the write": false, "after the write": true} {
		t.Run(name, func(t *testing.T) {
			for kill := 1; ; kill += every() {
				h := newHarness(t, moveOf("m"), appPod("data-0", false))
				h.kill, h.after = kill, after
				h.run("m")
				h.wantOn(nodeB)
				if t.Failed() {
					t.Fatalf("killed at write %d", kill)
				}
				if !h.killed {
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
func eachLook(t *testing.T, do func(h *harness), check func(h *harness)) {
	t.Helper()
	for at := 0; ; at += every() {
		h := newHarness(t, moveOf("m"), appPod("data-0", false))
		done := false
		h.run("m", func(look int) {
			if look == at {
				do(h)
				done = true
			}
		})
		check(h)
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
	eachLook(t, func(h *harness) {
		must.Succeed(h, client.IgnoreNotFound(h.api.Delete(h.Context(), moveOf("m"))))
	}, func(h *harness) {
		switch {
		case h.records[nodeA] != nil:
			undone++
			h.wantOn(nodeA)
		default:
			completed++
			h.wantOn(nodeB)
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
			h := newHarness(t, moveOf("m"), appPod("data-0", false))
			h.keeps = true
			h.run("m", func(look int) {
				if look == from {
					must.Succeed(t, h.api.Delete(t.Context(), moveOf("m")))
					h.kill = h.writes + kill
				}
			})
			h.wantOn(nodeA)
			if t.Failed() {
				t.Fatalf("deleted at look %d, killed at write %d", from, kill)
			}
			if !h.killed {
				break
			}
		}
	}
}

// A claim that is deleted takes its volume with it, wherever that is then.
func TestClaimDeletedAtAnyStep(t *testing.T) {
	eachLook(t, func(h *harness) {
		h.replicas = false
		must.Succeed(h, client.IgnoreNotFound(h.api.Delete(h.Context(), appPod("data-0", false))))
		must.Succeed(h, h.api.Delete(h.Context(), claimOf("data")))
		if h.move("m").Status.Phase == "" { // it would wait for a claim of the name
			must.Succeed(h, h.api.Delete(h.Context(), moveOf("m")))
		}
	}, func(h *harness) {
		h.wantNothingLeft()
		volume := volumeOf("pv")
		if !h.has(volume) || volume.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
			h.Fatalf("the PersistentVolume is %+v", volume)
		}
		if at := place.NodeOfVolume(volume); len(h.records) != 1 || h.records[at] == nil || !h.records[at].publishes() {
			h.Errorf("the volume is on %s; the nodes have %+v", at, h.records)
		}
	})
}

// An operator that was held up before a write, and makes that after another one has taken over and the move has ended, changes nothing of
// how it ended.
func TestWriteThatComesLate(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		for _, policy := range []corev1.PersistentVolumeReclaimPolicy{corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRetain} {
			for at, late := 1, true; late; at += every() {
				h := newHarness(t, moveOf("m"), appPod("data-0", false))
				volume := volumeOf("pv")
				h.has(volume)
				volume.Spec.PersistentVolumeReclaimPolicy = policy
				h.update(volume)
				late = false
				h.pause, h.between = at, func() {
					late = true
					if m := h.move("m"); deleted && m != nil && m.DeletionTimestamp == nil {
						deleteMove(h)
					}
					h.run("m")
				}
				h.run("m")
				h.live()
				h.live()
				on := nodeA
				if h.records[nodeA] == nil {
					on = nodeB
				}
				h.has(volume)
				if place.NodeOfVolume(volume) != on || volume.Spec.PersistentVolumeReclaimPolicy != policy || volume.DeletionTimestamp != nil || volume.Annotations[reclaimPolicy] != "" {
					t.Errorf("write %d comes late (the VolumeMove is deleted: %v): the nodes have %+v, and the PersistentVolume is %+v", at, deleted, h.records, volume)
				}
			}
		}
	}
}

// A read that fails at any time shows nothing of what it was about.
func TestReadFailsAtAnyTime(t *testing.T) {
	for on, meanwhile := range map[string]func(h *harness){
		nodeB: func(*harness) {},
		nodeA: func(h *harness) {
			if m := h.move("m"); m.Status.Phase == v1alpha1.Switching && m.DeletionTimestamp == nil {
				deleteMove(h)
			}
		},
	} {
		reads := []string{""}
		for i := 0; i < len(reads); i += every() {
			h := newHarness(t, moveOf("m"), appPod("data-0", false))
			h.fail = reads[i]
			h.run("m", func(int) { meanwhile(h) })
			h.wantOn(on)
			if t.Failed() {
				t.Fatalf("it fails to %s", reads[i])
			}
			if i == 0 {
				reads = append(reads, h.reads...)
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
		eachLook(t, func(h *harness) {
			pods := &corev1.PodList{}
			must.Succeed(h, h.api.List(h.Context(), pods, client.InNamespace(storage), client.MatchingLabels{roleLabel: string(of)}))
			for i := range pods.Items {
				delete(h.logs, pods.Items[i].Name)
				must.Succeed(h, h.api.Delete(h.Context(), &pods.Items[i]))
			}
		}, func(h *harness) { h.wantOn(nodeB) })
	}
}

// A size that csi-resizer writes at any time is that of the volume afterwards.
func TestGrowthAtAnyStep(t *testing.T) {
	size := resource.MustParse("20Gi")
	grow := func(h *harness) {
		if volume := volumeOf("pv"); h.has(volume) {
			volume.Spec.Capacity[corev1.ResourceStorage] = size
			metav1.SetMetaDataAnnotation(&volume.ObjectMeta, preResize, "10Gi")
			h.update(volume)
			h.keeps = false
		}
	}
	for at := 0; at < 40; at += 2 * every() {
		h := newHarness(t, moveOf("m"), appPod("data-0", false))
		grown := false
		h.run("m", func(look int) {
			if look >= at && !grown && h.has(volumeOf("pv")) {
				grow(h)
				grown = true
			}
		})
		h.wantOn(nodeB)
		volume := volumeOf("pv")
		if h.has(volume); grown && volume.Spec.Capacity.Storage().Cmp(size) != 0 {
			t.Fatalf("grown at look %d, the volume has %s", at, volume.Spec.Capacity.Storage())
		}
	}
}

// There and back.
func TestMoveBack(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	h.run("m")
	h.wantOn(nodeB)
	// The names of the stand-in's nodes change their places.
	h.records[nodeA], h.records[nodeB] = h.records[nodeB], nil
	delete(h.records, nodeB)
	volume := volumeOf("pv")
	h.has(volume)
	volume.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Values = []string{nodeA}
	h.update(volume)
	pod := appPod("data-0", false)
	must.Succeed(t, h.api.Delete(t.Context(), pod))
	h.schedule()
	must.Succeed(t, h.api.Create(t.Context(), moveOf("again", later)))
	h.run("again")
	h.wantOn(nodeB)
}

// A target that does not answer keeps no pod from the source after the move was undone.
func TestUndoWithoutTarget(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	h.keeps = true
	for range 12 {
		h.reconcile("m")
		h.live()
	}
	if h.records[nodeA].role != "source" {
		t.Fatal("the source is not fenced")
	}
	down := node(nodeB)
	h.has(down)
	down.Status.Conditions[0].Status = corev1.ConditionUnknown
	h.update(down)
	must.Succeed(t, h.api.Delete(t.Context(), moveOf("m")))
	for range 5 {
		h.reconcile("m")
		pods := &corev1.PodList{}
		must.Succeed(t, h.api.List(t.Context(), pods, client.MatchingLabels{roleLabel: string(roleUndo)}))
		for i := range pods.Items {
			h.mover(&pods.Items[i], nil)
		}
	}
	if !h.records[nodeA].publishes() || h.records[nodeB] == nil {
		t.Errorf("the nodes have %+v", h.records)
	}
	h.run("m")
	h.wantOn(nodeA)
}

// A last pass that takes long fills what is read of the mover's log, and pods stand still all the same.
func TestLongLastPass(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	said := ""
	h.run("m", func(int) {
		pod := h.moverOf(roleOut)
		if said != "" || pod == nil || !strings.Contains(h.logs[pod.Name], `"unused"`) {
			return
		}
		h.reconcile("m")
		h.logs[pod.Name] = "{\"event\":\"passing\",\"bytes\":1}\n"
		h.reconcile("m")
		said = h.says("m")
	})
	if !strings.Contains(said, "no pod uses the volume any more") {
		t.Errorf("it says %q", said)
	}
	h.wantOn(nodeB)
}
