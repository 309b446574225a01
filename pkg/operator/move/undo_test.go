package move

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Undone runs a move that is to be undone from when it is in a phase, while the disk of a node does not answer, although its node does. After
// a while it looks at what there is, and then the disk answers.
func undone(t *testing.T, phase v1alpha1.Phase, hangs string, by func(h *harness), look func(h *harness)) *harness {
	t.Helper()
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	at := 0
	h.run("m", func(now int) {
		switch {
		case at == 0 && h.move("m").Status.Phase == phase:
			at = now
			h.hangs = hangs
			by(h)
		case at > 0 && now == at+long:
			look(h)
			h.hangs = ""
		}
	})
	if h.hangs != "" || at == 0 {
		t.Error("nothing was tested")
	}
	return h
}

var undoable = []v1alpha1.Phase{v1alpha1.Fenced, v1alpha1.Switching}

func deleteMove(h *harness) { must.Succeed(h, h.api.Delete(h.Context(), moveOf("m"))) }

// A target whose disk does not answer keeps no pod from the source, whenever the VolumeMove is deleted before the PersistentVolume leads to it.
func TestUndoWithoutDiskOfTarget(t *testing.T) {
	for _, phase := range undoable {
		h := undone(t, phase, nodeB, deleteMove, func(h *harness) {
			if !h.records[nodeA].publishes() {
				t.Errorf("undone in the phase %s, the source has %+v: %s", phase, h.records[nodeA], h.says("m"))
			}
		})
		h.wantOn(nodeA)
	}
}

// A source whose disk does not answer has no copy be removed, which may be the only one.
func TestUndoWithoutDiskOfSource(t *testing.T) {
	for _, phase := range undoable {
		h := undone(t, phase, nodeA, deleteMove, func(h *harness) {
			if h.records[nodeB] == nil {
				t.Errorf("undone in the phase %s, the copy is gone: %s", phase, h.says("m"))
			}
		})
		h.wantOn(nodeA)
	}
}

// A source that was set up anew under its name, or has another disk, has no volume: then the copy is the last one, as long as the claim is
// there.
func TestUndoWithoutVolumeOnSource(t *testing.T) {
	for _, phase := range undoable {
		h := newHarness(t, moveOf("m"), appPod("data-0", false))
		at, kept := 0, false
		h.run("m", func(now int) {
			switch {
			case at == 0 && h.move("m").Status.Phase == phase && h.records[nodeB] != nil && h.records[nodeB].fence != "":
				at = now
				delete(h.records, nodeA)
				deleteMove(h)
			case at > 0 && now == at+long:
				kept = h.records[nodeB] != nil && strings.Contains(h.says("m"), nodeA)
				h.replicas = false
				must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))), h.api.Delete(t.Context(), claimOf("data")))
			}
		})
		if at == 0 || !kept || h.records[nodeB] != nil {
			t.Errorf("undone in the phase %s (%v), the last copy was kept: %v, and node-b has %+v in the end", phase, at > 0, kept, h.records[nodeB])
		}
		h.wantNothingLeft()
	}
}

// An operator that was down when the volume was moved, and deleted after that with its claim, removes what is left on the source.
func TestVolumeDeletedBeforeSwitchIsNoted(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	deleted := false
	h.run("m", func(int) {
		volume := volumeOf("pv")
		if deleted || h.move("m").Status.Phase != v1alpha1.Switching || !h.has(volume) || volume.Annotations[movedBy] == "" || volume.Annotations[reclaimPolicy] != "" {
			return
		}
		deleted, h.replicas = true, false
		volume.Finalizers = nil
		h.update(volume)
		confirmed := &corev1.Pod{ObjectMeta: madeFor("m").meta("-" + string(roleConfirm))}
		for _, object := range []client.Object{appPod("data-0", false), claimOf("data"), volume, confirmed} {
			must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), object)))
		}
		delete(h.records, nodeB)
	})
	if !deleted || len(h.records) > 0 {
		t.Errorf("deleted: %v, and the nodes have %+v: %s", deleted, h.records, h.says("m"))
	}
	h.wantNothingLeft()
}

// A volume whose claim was deleted is given up on each of the nodes that answers.
func TestGiveUpWithoutDisk(t *testing.T) {
	for hangs, given := range map[string]func(h *harness) bool{
		nodeA: func(h *harness) bool { return h.records[nodeB] == nil },
		nodeB: func(h *harness) bool { return h.records[nodeA].publishes() },
	} {
		undone(t, v1alpha1.Fenced, hangs, func(h *harness) {
			h.replicas = false
			must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))), h.api.Delete(t.Context(), claimOf("data")))
		}, func(h *harness) {
			if !given(h) {
				t.Errorf("without the disk of %s the nodes have %+v: %s", hangs, h.records, h.says("m"))
			}
		}).wantNothingLeft()
	}
}

// A source that a mover fences after it was unfenced, as an operator without its lease makes one, is unfenced again.
func TestUndoWithLateMover(t *testing.T) {
	tested := 0
	for at := 1; at < 12; at++ {
		h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
		h.pause = at
		h.between = func() {
			h.pause = 0
			deleteMove(h)
			undoes := &corev1.Pod{ObjectMeta: madeFor("m").meta("-" + string(roleUndo))}
			for range 100 {
				if h.has(undoes) && undoes.Status.Phase == corev1.PodSucceeded {
					tested++
					return
				}
				h.reconcile("m")
				h.live()
			}
		}
		for range 20 {
			if h.reconcile("m"); h.pause == 0 {
				break
			}
			h.live()
		}
		h.live() // while the next operator looks at other moves
		h.live()
		h.settle(nil)
		if h.move("m") == nil && (!h.records[nodeA].publishes() || h.records[nodeB] != nil) {
			t.Errorf("write %d is late, and the nodes have %+v and %+v", at, h.records[nodeA], h.records[nodeB])
		}
	}
	if tested == 0 {
		t.Error("nothing was undone")
	}
}
