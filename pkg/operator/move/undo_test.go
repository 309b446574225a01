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
func undone(t *testing.T, phase v1alpha1.Phase, hangs string, by func(w *world), look func(w *world)) *world {
	t.Helper()
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	at := 0
	w.run("m", func(now int) {
		switch {
		case at == 0 && w.move("m").Status.Phase == phase:
			at = now
			w.hangs = hangs
			by(w)
		case at > 0 && now == at+long:
			look(w)
			w.hangs = ""
		}
	})
	if w.hangs != "" || at == 0 {
		t.Error("nothing was tested")
	}
	return w
}

var undoable = []v1alpha1.Phase{v1alpha1.Fenced, v1alpha1.Switching}

func deleteMove(w *world) { must.Succeed(w, w.api.Delete(w.Context(), moveOf("m"))) }

// A target whose disk does not answer keeps no pod from the source, whenever the VolumeMove is deleted before the PersistentVolume leads to it.
func TestUndoWithoutDiskOfTarget(t *testing.T) {
	for _, phase := range undoable {
		w := undone(t, phase, nodeB, deleteMove, func(w *world) {
			if !w.records[nodeA].publishes() {
				t.Errorf("undone in the phase %s, the source has %+v: %s", phase, w.records[nodeA], w.says("m"))
			}
		})
		w.wantOn(nodeA)
	}
}

// A source whose disk does not answer has no copy be removed, which may be the only one.
func TestUndoWithoutDiskOfSource(t *testing.T) {
	for _, phase := range undoable {
		w := undone(t, phase, nodeA, deleteMove, func(w *world) {
			if w.records[nodeB] == nil {
				t.Errorf("undone in the phase %s, the copy is gone: %s", phase, w.says("m"))
			}
		})
		w.wantOn(nodeA)
	}
}

// A source that was set up anew under its name, or has another disk, has no volume: then the copy is the last one, as long as the claim is
// there.
func TestUndoWithoutVolumeOnSource(t *testing.T) {
	for _, phase := range undoable {
		w := newWorld(t, moveOf("m"), appPod("data-0", false))
		at, kept := 0, false
		w.run("m", func(now int) {
			switch {
			case at == 0 && w.move("m").Status.Phase == phase && w.records[nodeB] != nil && w.records[nodeB].fence != "":
				at = now
				delete(w.records, nodeA)
				deleteMove(w)
			case at > 0 && now == at+long:
				kept = w.records[nodeB] != nil && strings.Contains(w.says("m"), nodeA)
				w.replicas = false
				must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), appPod("data-0", false))), w.api.Delete(t.Context(), claimOf("data")))
			}
		})
		if at == 0 || !kept || w.records[nodeB] != nil {
			t.Errorf("undone in the phase %s (%v), the last copy was kept: %v, and node-b has %+v in the end", phase, at > 0, kept, w.records[nodeB])
		}
		w.wantNothingLeft()
	}
}

// An operator that was down when the volume was moved, and deleted after that with its claim, removes what is left on the source.
func TestVolumeDeletedBeforeSwitchIsNoted(t *testing.T) {
	w := newWorld(t, moveOf("m"), appPod("data-0", false))
	deleted := false
	w.run("m", func(int) {
		volume := volumeOf("pv")
		if deleted || w.move("m").Status.Phase != v1alpha1.Switching || !w.has(volume) || volume.Annotations[movedBy] == "" || volume.Annotations[reclaimPolicy] != "" {
			return
		}
		deleted, w.replicas = true, false
		volume.Finalizers = nil
		w.update(volume)
		confirmed := &corev1.Pod{ObjectMeta: madeFor("m").meta("-" + string(roleConfirm))}
		for _, object := range []client.Object{appPod("data-0", false), claimOf("data"), volume, confirmed} {
			must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), object)))
		}
		delete(w.records, nodeB)
	})
	if !deleted || len(w.records) > 0 {
		t.Errorf("deleted: %v, and the nodes have %+v: %s", deleted, w.records, w.says("m"))
	}
	w.wantNothingLeft()
}

// A volume whose claim was deleted is given up on each of the nodes that answers.
func TestGiveUpWithoutDisk(t *testing.T) {
	for hangs, given := range map[string]func(w *world) bool{
		nodeA: func(w *world) bool { return w.records[nodeB] == nil },
		nodeB: func(w *world) bool { return w.records[nodeA].publishes() },
	} {
		undone(t, v1alpha1.Fenced, hangs, func(w *world) {
			w.replicas = false
			must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), appPod("data-0", false))), w.api.Delete(t.Context(), claimOf("data")))
		}, func(w *world) {
			if !given(w) {
				t.Errorf("without the disk of %s the nodes have %+v: %s", hangs, w.records, w.says("m"))
			}
		}).wantNothingLeft()
	}
}

// A source that a mover fences after it was unfenced, as an operator without its lease makes one, is unfenced again.
func TestUndoWithLateMover(t *testing.T) {
	tested := 0
	for at := 1; at < 12; at++ {
		w := newWorld(t, moveOf("m", to(nodeB)), appPod("data-0", false))
		w.pause = at
		w.between = func() {
			w.pause = 0
			deleteMove(w)
			undoes := &corev1.Pod{ObjectMeta: madeFor("m").meta("-" + string(roleUndo))}
			for range 100 {
				if w.has(undoes) && undoes.Status.Phase == corev1.PodSucceeded {
					tested++
					return
				}
				w.reconcile("m")
				w.live()
			}
		}
		for range 20 {
			if w.reconcile("m"); w.pause == 0 {
				break
			}
			w.live()
		}
		w.live() // while the next operator looks at other moves
		w.live()
		w.settle(nil)
		if w.move("m") == nil && (!w.records[nodeA].publishes() || w.records[nodeB] != nil) {
			t.Errorf("write %d is late, and the nodes have %+v and %+v", at, w.records[nodeA], w.records[nodeB])
		}
	}
	if tested == 0 {
		t.Error("nothing was undone")
	}
}
