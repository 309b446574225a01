package move

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A successor is the VolumeMove that is made when another one was removed by force; nil for none.
type successor func() *v1alpha1.VolumeMove

// successors are of the same name or of another.
var successors = map[string]successor{
	"no other": nil,
	"one of its name": func() *v1alpha1.VolumeMove {
		return moveOf("m", to(nodeB), func(m *v1alpha1.VolumeMove) { m.UID = "made anew" })
	},
	"one of another name": func() *v1alpha1.VolumeMove { return moveOf("n", to(nodeB)) },
}

// removeByForce takes the finalizer of a VolumeMove away, and makes another.
func (w *world) removeByForce(other successor) {
	w.Helper()
	m := w.move("m")
	w.forced, m.Finalizers = true, nil
	w.update(m)
	must.Succeed(w, client.IgnoreNotFound(w.api.Delete(w.Context(), m)))
	if other != nil {
		must.Succeed(w, w.api.Create(w.Context(), other()))
	}
}

// settle runs operators until nothing of moves is left, and the other VolumeMove has ended or has nothing to do.
func (w *world) settle(other successor) {
	w.Helper()
	next := "m"
	if other != nil {
		next = other().Name
	}
	for range 200 {
		for _, name := range []string{"m", next} {
			w.reconcile(name)
			w.live()
		}
		m := w.move(next)
		if w.left() == 0 && (m == nil || m.Ended() && len(m.Finalizers) == 0 || strings.Contains(w.says(next), "node node-b has the volume")) {
			return
		}
	}
	for _, pod := range w.movers() {
		w.Logf("pod %s: %+v", pod.Name, pod.Status)
	}
	says := ""
	if w.move(next) != nil {
		says = w.says(next)
	}
	w.Fatalf("it does not end: the nodes have %+v and %+v, and %d objects of moves are left: %s", w.records[nodeA], w.records[nodeB], w.left(), says)
}

// left is how many objects of moves there are in the driver's namespace.
func (w *world) left() (n int) {
	w.Helper()
	for _, list := range []client.ObjectList{&corev1.PodList{}, &corev1.SecretList{}, &networkingv1.NetworkPolicyList{}} {
		must.Succeed(w, w.api.List(w.Context(), list, client.InNamespace(storage), client.HasLabels{moveLabel}))
		n += meta.LenList(list)
	}
	return n
}

// wantWhereItIs expects the volume where its PersistentVolume leads to: with another VolumeMove, on the target.
func (w *world) wantWhereItIs(other successor) {
	w.Helper()
	volume := volumeOf("pv")
	if on := place.NodeOfVolume(volume); !w.has(volume) || other != nil && place.NodeOfVolume(volume) != nodeB {
		w.Errorf("the PersistentVolume leads to %q", on)
	}
	w.wantOn(place.NodeOfVolume(volume))
}

// afterEachLook does something with a move after its first look, its first two, and so on until it has ended.
func afterEachLook(t *testing.T, do func(w *world, m *v1alpha1.VolumeMove)) {
	t.Helper()
	for at, done := 1, false; !done; at += every() {
		w := newWorld(t, moveOf("m", to(nodeB)), appPod("data-0", false))
		for range at {
			w.reconcile("m")
			w.live()
		}
		m := w.move("m")
		done = m.Ended() && len(m.Finalizers) == 0
		if do(w, m); t.Failed() {
			t.Fatalf("after look %d, in the phase %s", at, m.Status.Phase)
		}
	}
}

// A VolumeMove that is removed by force at any step is ended as one that was deleted: no mover, which would fence the volume for nothing, nor
// copy is left, and another one that is made at once, under its name or another, moves the volume.
func TestRemovedByForce(t *testing.T) {
	for name, other := range successors {
		t.Run(name, func(t *testing.T) {
			reached := map[v1alpha1.Phase]bool{}
			afterEachLook(t, func(w *world, m *v1alpha1.VolumeMove) {
				reached[m.Status.Phase] = true
				w.removeByForce(other)
				w.settle(other)
				w.wantWhereItIs(other)
			})
			if every() == 1 && len(reached) < 5 {
				t.Errorf("removed in the phases %v only", reached)
			}
		})
	}
}

// An operator that ends such a move may be killed at any write.
func TestRemovedByForceAndKilled(t *testing.T) {
	for _, looks := range []int{8, 16} {
		for _, after := range []bool{false, true} {
			for at := 1; ; at += every() {
				w := newWorld(t, moveOf("m", to(nodeB)), appPod("data-0", false))
				for range looks {
					w.reconcile("m")
					w.live()
				}
				other := successors["one of its name"]
				w.removeByForce(other)
				w.kill, w.after = w.writes+at, after
				w.settle(other)
				w.wantWhereItIs(other)
				if t.Failed() {
					t.Fatalf("after %d looks, killed at write %d (%v)", looks, at, after)
				}
				if !w.killed {
					break
				}
			}
		}
	}
}

// What an operator made that noted nothing of the beginning of its moves is removed, but for a Secret with a PersistentVolume, which may be missing.
func TestRemovedByForceUnderEarlierOperator(t *testing.T) {
	for phase, keeps := range map[v1alpha1.Phase]bool{v1alpha1.Copying: false, v1alpha1.Fenced: false, v1alpha1.Switching: true} {
		w := newWorld(t, moveOf("m"), appPod("data-0", false))
		for range 100 {
			if w.move("m").Status.Phase == phase {
				break
			}
			w.reconcile("m")
			w.live()
		}
		w.reconcile("m")
		for _, list := range []client.ObjectList{&corev1.PodList{}, &networkingv1.NetworkPolicyList{}} {
			must.Succeed(t, w.api.List(t.Context(), list, client.InNamespace(storage), client.HasLabels{moveLabel}))
			must.Succeed(t, meta.EachListItem(list, func(o runtime.Object) error {
				object := o.(client.Object)
				delete(object.GetAnnotations(), begunAnnotation)
				return w.api.Update(t.Context(), object)
			}))
		}
		w.removeByForce(nil)
		for range 3 {
			w.reconcile("m")
		}
		if secret := (&corev1.Secret{ObjectMeta: madeFor("m").meta("")}); w.has(secret) != keeps || keeps != (w.left() == 1) {
			t.Errorf("in the phase %s the Secret is there: %v, want %v; %d objects are left", phase, !keeps, keeps, w.left())
		}
	}
}

// What is made for a VolumeMove that is there, of the same name in another namespace, is no business of one that is removed.
func TestRemovedByForceBesideAnother(t *testing.T) {
	w := newWorld(t, moveOf("m"), moveOf("m", func(m *v1alpha1.VolumeMove) { m.Namespace, m.UID = "elsewhere", "other" }), appPod("data-0", false))
	w.reconcile("m")
	w.reconcile("m")
	other := moveOf("m", func(m *v1alpha1.VolumeMove) { m.Namespace, m.UID = "elsewhere", "other" })
	pod := &corev1.Pod{ObjectMeta: objects{move: other, namespace: storage}.meta("-in")}
	pod.Labels[roleLabel] = string(roleIn)
	pod.Spec.NodeName, pod.Spec.Containers = nodeC, []corev1.Container{{Args: []string{"move-in"}}}
	must.Succeed(t, w.api.Create(t.Context(), pod))
	w.removeByForce(nil)
	for range 100 {
		w.reconcile("m")
		w.live()
	}
	if !w.has(pod) || w.left() != 1 {
		t.Errorf("%d objects are left", w.left())
	}
}

// One whose claim goes with it is given up on both nodes.
func TestRemovedByForceWithItsClaim(t *testing.T) {
	afterEachLook(t, func(w *world, _ *v1alpha1.VolumeMove) {
		w.replicas = false
		must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), appPod("data-0", false))), w.api.Delete(t.Context(), claimOf("data")))
		w.removeByForce(nil)
		w.settle(nil)
		if w.records[nodeA] != nil && (w.records[nodeA].role != "" || w.records[nodeB] != nil) {
			t.Errorf("the nodes have %+v and %+v", w.records[nodeA], w.records[nodeB])
		}
	})
}

// Nor does a copy stay that is confirmed, and to which no PersistentVolume leads.
func TestRemovedByForceWithItsClaimWhenConfirmed(t *testing.T) {
	w := newWorld(t, moveOf("m", to(nodeB)), appPod("data-0", false))
	for range 100 {
		if has := w.records[nodeB]; has != nil && has.moved != "" {
			break
		}
		w.reconcile("m")
		w.live()
	}
	w.replicas = false
	must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), appPod("data-0", false))), w.api.Delete(t.Context(), claimOf("data")))
	w.removeByForce(nil)
	w.settle(nil)
	if w.records[nodeB] != nil || !w.records[nodeA].publishes() {
		t.Errorf("the nodes have %+v and %+v", w.records[nodeA], w.records[nodeB])
	}
}

// One that has ended, and waits for a mover of a node without kubelet, is not ended once more: another one may have taken the volume on.
func TestRemovedByForceAfterItsEnd(t *testing.T) {
	for _, comesBack := range []bool{true, false} {
		w := newWorld(t, moveOf("m", to(nodeB)), appPod("data-0", false))
		for range 100 {
			if w.move("m").Ended() {
				break
			}
			w.reconcile("m")
			w.live()
		}
		stays := &corev1.Pod{ObjectMeta: madeFor("m").meta("-" + string(roleRemove))}
		w.has(stays)
		stays.Finalizers = []string{"test/kubelet"}
		w.update(stays)
		w.reconcile("m")
		volume := volumeOf("pv")
		w.has(volume)
		volume.Annotations[movedBy], volume.Spec.NodeAffinity = "move-n", onNode(nodeC)
		w.update(volume)
		delete(w.records, nodeB)
		w.records[nodeC] = &record{moved: "move-n"}
		w.removeByForce(nil)
		w.has(stays)
		stays.Finalizers = nil
		w.update(stays)
		if !comesBack {
			w.goes(nodeA)
		}
		w.settle(nil)
	}
}

// Its NetworkPolicy, by which it is heard of, stays until the move has ended, whatever deletes it.
func TestNetworkPolicyIsDeletedBeforeItsMoveIsRemovedByForce(t *testing.T) {
	afterEachLook(t, func(w *world, _ *v1alpha1.VolumeMove) {
		policy := &networkingv1.NetworkPolicy{ObjectMeta: madeFor("m").meta("")}
		must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), policy)))
		w.removeByForce(nil)
		w.settle(nil)
		w.wantWhereItIs(nil)
	})
}

// movers are the pods of moves.
func (w *world) movers() []corev1.Pod {
	w.Helper()
	pods := &corev1.PodList{}
	must.Succeed(w, w.api.List(w.Context(), pods, client.InNamespace(storage), client.HasLabels{moveLabel}))
	return pods.Items
}

// A mover that an operator without its lease makes when its move has ended is removed by the move that meets it, of whatever name.
func TestLateMover(t *testing.T) {
	for _, force := range []bool{false, true} {
		for _, late := range []role{roleIn, roleOut, roleConfirm} {
			w := newWorld(t, moveOf("m", to(nodeB)), appPod("data-0", false))
			pods := map[role]corev1.Pod{}
			for range 100 {
				if _, there := pods[roleConfirm]; there {
					break
				}
				w.reconcile("m")
				for _, pod := range w.movers() {
					pods[role(pod.Labels[roleLabel])] = pod
				}
				w.live()
			}
			if force {
				w.removeByForce(nil)
			} else {
				deleteMove(w)
			}
			w.settle(nil)
			pod := pods[late]
			pod.ResourceVersion, pod.UID = "", ""
			must.Succeed(t, w.api.Create(t.Context(), &pod), w.api.Create(t.Context(), moveOf("n", to(nodeB))))
			w.run("n")
			w.wantOn(nodeB)
		}
	}
}

// An operator looks for such a mover, too, where no other move meets it.
func TestLateMoverIsLookedFor(t *testing.T) {
	w := newWorld(t, moveOf("m", to(nodeB)), appPod("data-0", false))
	for len(w.movers()) == 0 {
		w.reconcile("m")
	}
	late := w.movers()[0]
	deleteMove(w)
	w.settle(nil)
	late.ResourceVersion, late.UID = "", ""
	must.Succeed(t, w.api.Create(t.Context(), &late))
	w.lookUntilNothingIsLeft()
	w.wantOn(nodeA)
}

// lookUntilNothingIsLeft has operators look for late movers until the VolumeMove m alone is left.
func (w *world) lookUntilNothingIsLeft() {
	w.Helper()
	for range 50 {
		w.look()
		w.reconcile("m")
		w.live()
		if w.left() == 0 {
			return
		}
	}
	w.Errorf("%d objects of moves are left", w.left())
}

// It is ended by the uid of its move, whatever a VolumeMove of the same name does meanwhile or has done.
func TestLateMoverBesideOneOfItsName(t *testing.T) {
	for _, late := range []role{roleOut, roleIn} {
		for _, phase := range []v1alpha1.Phase{v1alpha1.Copying, v1alpha1.Succeeded} {
			w := newWorld(t, moveOf("m", to(nodeB)), appPod("data-0", false))
			for len(w.movers()) < 2 {
				w.reconcile("m")
				w.live()
			}
			all := w.movers()
			pod := all[slices.IndexFunc(all, func(p corev1.Pod) bool { return p.Labels[roleLabel] == string(late) })]
			w.removeByForce(successors["one of its name"])
			w.runUntil("m", phase)
			pod.ResourceVersion, pod.UID = "", ""
			must.Succeed(t, w.api.Create(t.Context(), &pod))
			w.lookUntilNothingIsLeft()
			if w.run("m"); w.move("m").Status.Phase != v1alpha1.Succeeded {
				t.Errorf("%s made late in the phase %s: %s", late, phase, w.says("m"))
			}
			w.wantOn(nodeB)
		}
	}
}

// runUntil reconciles until a move is in a phase.
func (w *world) runUntil(name string, phase v1alpha1.Phase) {
	w.Helper()
	for range 200 {
		if w.move(name).Status.Phase == phase {
			return
		}
		w.reconcile(name)
		w.live()
	}
	w.Fatalf("the phase is %s, not %s: %s", w.move(name).Status.Phase, phase, w.says(name))
}

// Nor does one stay that is made for a VolumeMove that has ended, and is there.
func TestLateMoverOfOneThatHasEnded(t *testing.T) {
	for phase, on := range map[v1alpha1.Phase]string{v1alpha1.Succeeded: nodeB, v1alpha1.Failed: nodeA} {
		w := newWorld(t, moveOf("m", to(nodeB)), appPod("data-0", false))
		for len(w.movers()) < 2 {
			w.reconcile("m")
			w.live()
		}
		pod := w.movers()[0]
		if m := w.move("m"); phase == v1alpha1.Failed {
			m.Status.Phase = v1alpha1.Undoing
			w.update(m)
		}
		w.run("m")
		pod.ResourceVersion, pod.UID = "", ""
		must.Succeed(t, w.api.Create(t.Context(), &pod))
		w.lookUntilNothingIsLeft()
		if is := w.move("m").Status.Phase; is != phase {
			t.Errorf("the move is %s, want %s", is, phase)
		}
		w.wantOn(on)
	}
}

// What the Secret notes of the switch outlasts the certificates, which are renewed while the old copy cannot be removed: by it both copies of a
// volume go whose namespace is deleted, with the VolumeMove by force.
func TestCertificatesAreRenewedBeforeRemovalByForce(t *testing.T) {
	w := newWorld(t, moveOf("m", to(nodeB)), appPod("data-0", false))
	ahead := time.Duration(0)
	w.clock = func() time.Time { return time.Now().Add(ahead) }
	w.runUntil("m", v1alpha1.Removing)
	w.hangs = nodeA
	look := func() *corev1.Secret {
		for range 10 {
			w.reconcile("m")
			w.live()
		}
		secret := &corev1.Secret{ObjectMeta: madeFor("m").meta("")}
		w.has(secret)
		return secret
	}
	before := look()
	ahead = lifetime - deadline
	after := look()
	if ahead = 0; bytes.Equal(before.Data[authorityFile], after.Data[authorityFile]) {
		t.Error("the certificates are not renewed")
	}
	for _, key := range []string{volumeFile, sizeFile, fenceFile, placedFile} {
		if !bytes.Equal(before.Data[key], after.Data[key]) || len(after.Data[key]) == 0 {
			t.Errorf("%s was %q, and is %q", key, before.Data[key], after.Data[key])
		}
	}
	volume := volumeOf("pv")
	w.replicas = false
	must.Succeed(t, w.api.Delete(t.Context(), claimOf("data")), client.IgnoreNotFound(w.api.Delete(t.Context(), appPod("data-0", false))))
	delete(w.records, nodeB)
	w.has(volume)
	volume.Finalizers = nil
	w.update(volume)
	must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), volumeOf("pv"))))
	w.hangs = ""
	w.removeByForce(nil)
	w.settle(nil)
	if w.records[nodeA] != nil {
		t.Errorf("the source keeps %+v", w.records[nodeA])
	}
}
