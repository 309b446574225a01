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
func (h *harness) removeByForce(other successor) {
	h.Helper()
	m := h.move("m")
	h.forced, m.Finalizers = true, nil
	h.update(m)
	must.Succeed(h, client.IgnoreNotFound(h.api.Delete(h.Context(), m)))
	if other != nil {
		must.Succeed(h, h.api.Create(h.Context(), other()))
	}
}

// settle runs operators until nothing of moves is left, and the other VolumeMove has ended or has nothing to do.
func (h *harness) settle(other successor) {
	h.Helper()
	next := "m"
	if other != nil {
		next = other().Name
	}
	for range 200 {
		for _, name := range []string{"m", next} {
			h.reconcile(name)
			h.live()
		}
		m := h.move(next)
		if h.left() == 0 && (m == nil || m.Ended() && len(m.Finalizers) == 0 || strings.Contains(h.says(next), "node node-b has the volume")) {
			return
		}
	}
	for _, pod := range h.movers() {
		h.Logf("pod %s: %+v", pod.Name, pod.Status)
	}
	says := ""
	if h.move(next) != nil {
		says = h.says(next)
	}
	h.Fatalf("it does not end: the nodes have %+v and %+v, and %d objects of moves are left: %s", h.records[nodeA], h.records[nodeB], h.left(), says)
}

// left is how many objects of moves there are in the driver's namespace.
func (h *harness) left() (n int) {
	h.Helper()
	for _, list := range []client.ObjectList{&corev1.PodList{}, &corev1.SecretList{}, &networkingv1.NetworkPolicyList{}} {
		must.Succeed(h, h.api.List(h.Context(), list, client.InNamespace(storage), client.HasLabels{moveLabel}))
		n += meta.LenList(list)
	}
	return n
}

// wantWhereItIs expects the volume where its PersistentVolume leads to: with another VolumeMove, on the target.
func (h *harness) wantWhereItIs(other successor) {
	h.Helper()
	volume := volumeOf("pv")
	if on := place.NodeOfVolume(volume); !h.has(volume) || other != nil && place.NodeOfVolume(volume) != nodeB {
		h.Errorf("the PersistentVolume leads to %q", on)
	}
	h.wantOn(place.NodeOfVolume(volume))
}

// afterEachLook does something with a move after its first look, its first two, and so on until it has ended.
func afterEachLook(t *testing.T, do func(h *harness, m *v1alpha1.VolumeMove)) {
	t.Helper()
	for at, done := 1, false; !done; at += every() {
		h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
		for range at {
			h.reconcile("m")
			h.live()
		}
		m := h.move("m")
		done = m.Ended() && len(m.Finalizers) == 0
		if do(h, m); t.Failed() {
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
			afterEachLook(t, func(h *harness, m *v1alpha1.VolumeMove) {
				reached[m.Status.Phase] = true
				h.removeByForce(other)
				h.settle(other)
				h.wantWhereItIs(other)
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
				h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
				for range looks {
					h.reconcile("m")
					h.live()
				}
				other := successors["one of its name"]
				h.removeByForce(other)
				h.kill, h.after = h.writes+at, after
				h.settle(other)
				h.wantWhereItIs(other)
				if t.Failed() {
					t.Fatalf("after %d looks, killed at write %d (%v)", looks, at, after)
				}
				if !h.killed {
					break
				}
			}
		}
	}
}

// What an operator made that noted nothing of the beginning of its moves is removed, but for a Secret with a PersistentVolume, which may be missing.
func TestRemovedByForceUnderEarlierOperator(t *testing.T) {
	for phase, keeps := range map[v1alpha1.Phase]bool{v1alpha1.Copying: false, v1alpha1.Fenced: false, v1alpha1.Switching: true} {
		h := newHarness(t, moveOf("m"), appPod("data-0", false))
		for range 100 {
			if h.move("m").Status.Phase == phase {
				break
			}
			h.reconcile("m")
			h.live()
		}
		h.reconcile("m")
		for _, list := range []client.ObjectList{&corev1.PodList{}, &networkingv1.NetworkPolicyList{}} {
			must.Succeed(t, h.api.List(t.Context(), list, client.InNamespace(storage), client.HasLabels{moveLabel}))
			must.Succeed(t, meta.EachListItem(list, func(o runtime.Object) error {
				object := o.(client.Object)
				delete(object.GetAnnotations(), begunAnnotation)
				return h.api.Update(t.Context(), object)
			}))
		}
		h.removeByForce(nil)
		for range 3 {
			h.reconcile("m")
		}
		if secret := (&corev1.Secret{ObjectMeta: madeFor("m").meta("")}); h.has(secret) != keeps || keeps != (h.left() == 1) {
			t.Errorf("in the phase %s the Secret is there: %v, want %v; %d objects are left", phase, !keeps, keeps, h.left())
		}
	}
}

// What is made for a VolumeMove that is there, of the same name in another namespace, is no business of one that is removed.
func TestRemovedByForceBesideAnother(t *testing.T) {
	h := newHarness(t, moveOf("m"), moveOf("m", func(m *v1alpha1.VolumeMove) { m.Namespace, m.UID = "elsewhere", "other" }), appPod("data-0", false))
	h.reconcile("m")
	h.reconcile("m")
	other := moveOf("m", func(m *v1alpha1.VolumeMove) { m.Namespace, m.UID = "elsewhere", "other" })
	pod := &corev1.Pod{ObjectMeta: objects{move: other, namespace: storage}.meta("-in")}
	pod.Labels[roleLabel] = string(roleIn)
	pod.Spec.NodeName, pod.Spec.Containers = nodeC, []corev1.Container{{Args: []string{"move-in"}}}
	must.Succeed(t, h.api.Create(t.Context(), pod))
	h.removeByForce(nil)
	for range 100 {
		h.reconcile("m")
		h.live()
	}
	if !h.has(pod) || h.left() != 1 {
		t.Errorf("%d objects are left", h.left())
	}
}

// One whose claim goes with it is given up on both nodes.
func TestRemovedByForceWithItsClaim(t *testing.T) {
	afterEachLook(t, func(h *harness, _ *v1alpha1.VolumeMove) {
		h.replicas = false
		must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))), h.api.Delete(t.Context(), claimOf("data")))
		h.removeByForce(nil)
		h.settle(nil)
		if h.records[nodeA] != nil && (h.records[nodeA].role != "" || h.records[nodeB] != nil) {
			t.Errorf("the nodes have %+v and %+v", h.records[nodeA], h.records[nodeB])
		}
	})
}

// Nor does a copy stay that is confirmed, and to which no PersistentVolume leads.
func TestRemovedByForceWithItsClaimWhenConfirmed(t *testing.T) {
	h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
	for range 100 {
		if has := h.records[nodeB]; has != nil && has.moved != "" {
			break
		}
		h.reconcile("m")
		h.live()
	}
	h.replicas = false
	must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))), h.api.Delete(t.Context(), claimOf("data")))
	h.removeByForce(nil)
	h.settle(nil)
	if h.records[nodeB] != nil || !h.records[nodeA].publishes() {
		t.Errorf("the nodes have %+v and %+v", h.records[nodeA], h.records[nodeB])
	}
}

// One that has ended, and waits for a mover of a node without kubelet, is not ended once more: another one may have taken the volume on.
func TestRemovedByForceAfterItsEnd(t *testing.T) {
	for _, comesBack := range []bool{true, false} {
		h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
		for range 100 {
			if h.move("m").Ended() {
				break
			}
			h.reconcile("m")
			h.live()
		}
		stays := &corev1.Pod{ObjectMeta: madeFor("m").meta("-" + string(roleRemove))}
		h.has(stays)
		stays.Finalizers = []string{"test/kubelet"}
		h.update(stays)
		h.reconcile("m")
		volume := volumeOf("pv")
		h.has(volume)
		volume.Annotations[movedBy], volume.Spec.NodeAffinity = "move-n", onNode(nodeC)
		h.update(volume)
		delete(h.records, nodeB)
		h.records[nodeC] = &record{moved: "move-n"}
		h.removeByForce(nil)
		h.has(stays)
		stays.Finalizers = nil
		h.update(stays)
		if !comesBack {
			h.goes(nodeA)
		}
		h.settle(nil)
	}
}

// Its NetworkPolicy, by which it is heard of, stays until the move has ended, whatever deletes it.
func TestNetworkPolicyIsDeletedBeforeItsMoveIsRemovedByForce(t *testing.T) {
	afterEachLook(t, func(h *harness, _ *v1alpha1.VolumeMove) {
		policy := &networkingv1.NetworkPolicy{ObjectMeta: madeFor("m").meta("")}
		must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), policy)))
		h.removeByForce(nil)
		h.settle(nil)
		h.wantWhereItIs(nil)
	})
}

// movers are the pods of moves.
func (h *harness) movers() []corev1.Pod {
	h.Helper()
	pods := &corev1.PodList{}
	must.Succeed(h, h.api.List(h.Context(), pods, client.InNamespace(storage), client.HasLabels{moveLabel}))
	return pods.Items
}

// A mover that an operator without its lease makes when its move has ended is removed by the move that meets it, of whatever name.
func TestLateMover(t *testing.T) {
	for _, force := range []bool{false, true} {
		for _, late := range []role{roleIn, roleOut, roleConfirm} {
			h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
			pods := map[role]corev1.Pod{}
			for range 100 {
				if _, there := pods[roleConfirm]; there {
					break
				}
				h.reconcile("m")
				for _, pod := range h.movers() {
					pods[role(pod.Labels[roleLabel])] = pod
				}
				h.live()
			}
			if force {
				h.removeByForce(nil)
			} else {
				deleteMove(h)
			}
			h.settle(nil)
			pod := pods[late]
			pod.ResourceVersion, pod.UID = "", ""
			must.Succeed(t, h.api.Create(t.Context(), &pod), h.api.Create(t.Context(), moveOf("n", to(nodeB))))
			h.run("n")
			h.wantOn(nodeB)
		}
	}
}

// An operator looks for such a mover, too, where no other move meets it.
func TestLateMoverIsLookedFor(t *testing.T) {
	h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
	for len(h.movers()) == 0 {
		h.reconcile("m")
	}
	late := h.movers()[0]
	deleteMove(h)
	h.settle(nil)
	late.ResourceVersion, late.UID = "", ""
	must.Succeed(t, h.api.Create(t.Context(), &late))
	h.lookUntilNothingIsLeft()
	h.wantOn(nodeA)
}

// lookUntilNothingIsLeft has operators look for late movers until the VolumeMove m alone is left.
func (h *harness) lookUntilNothingIsLeft() {
	h.Helper()
	for range 50 {
		h.look()
		h.reconcile("m")
		h.live()
		if h.left() == 0 {
			return
		}
	}
	h.Errorf("%d objects of moves are left", h.left())
}

// It is ended by the uid of its move, whatever a VolumeMove of the same name does meanwhile or has done.
func TestLateMoverBesideOneOfItsName(t *testing.T) {
	for _, late := range []role{roleOut, roleIn} {
		for _, phase := range []v1alpha1.Phase{v1alpha1.Copying, v1alpha1.Succeeded} {
			h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
			for len(h.movers()) < 2 {
				h.reconcile("m")
				h.live()
			}
			all := h.movers()
			pod := all[slices.IndexFunc(all, func(p corev1.Pod) bool { return p.Labels[roleLabel] == string(late) })]
			h.removeByForce(successors["one of its name"])
			h.runUntil("m", phase)
			pod.ResourceVersion, pod.UID = "", ""
			must.Succeed(t, h.api.Create(t.Context(), &pod))
			h.lookUntilNothingIsLeft()
			if h.run("m"); h.move("m").Status.Phase != v1alpha1.Succeeded {
				t.Errorf("%s made late in the phase %s: %s", late, phase, h.says("m"))
			}
			h.wantOn(nodeB)
		}
	}
}

// runUntil reconciles until a move is in a phase.
func (h *harness) runUntil(name string, phase v1alpha1.Phase) {
	h.Helper()
	for range 200 {
		if h.move(name).Status.Phase == phase {
			return
		}
		h.reconcile(name)
		h.live()
	}
	h.Fatalf("the phase is %s, not %s: %s", h.move(name).Status.Phase, phase, h.says(name))
}

// Nor does one stay that is made for a VolumeMove that has ended, and is there.
func TestLateMoverOfOneThatHasEnded(t *testing.T) {
	for phase, on := range map[v1alpha1.Phase]string{v1alpha1.Succeeded: nodeB, v1alpha1.Failed: nodeA} {
		h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
		for len(h.movers()) < 2 {
			h.reconcile("m")
			h.live()
		}
		pod := h.movers()[0]
		if m := h.move("m"); phase == v1alpha1.Failed {
			m.Status.Phase = v1alpha1.Undoing
			h.update(m)
		}
		h.run("m")
		pod.ResourceVersion, pod.UID = "", ""
		must.Succeed(t, h.api.Create(t.Context(), &pod))
		h.lookUntilNothingIsLeft()
		if is := h.move("m").Status.Phase; is != phase {
			t.Errorf("the move is %s, want %s", is, phase)
		}
		h.wantOn(on)
	}
}

// What the Secret notes of the switch outlasts the certificates, which are renewed while the old copy cannot be removed: by it both copies of a
// volume go whose namespace is deleted, with the VolumeMove by force.
func TestCertificatesAreRenewedBeforeRemovalByForce(t *testing.T) {
	h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
	ahead := time.Duration(0)
	h.clock = func() time.Time { return time.Now().Add(ahead) }
	h.runUntil("m", v1alpha1.Removing)
	h.hangs = nodeA
	look := func() *corev1.Secret {
		for range 10 {
			h.reconcile("m")
			h.live()
		}
		secret := &corev1.Secret{ObjectMeta: madeFor("m").meta("")}
		h.has(secret)
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
	h.replicas = false
	must.Succeed(t, h.api.Delete(t.Context(), claimOf("data")), client.IgnoreNotFound(h.api.Delete(t.Context(), appPod("data-0", false))))
	delete(h.records, nodeB)
	h.has(volume)
	volume.Finalizers = nil
	h.update(volume)
	must.Succeed(t, client.IgnoreNotFound(h.api.Delete(t.Context(), volumeOf("pv"))))
	h.hangs = ""
	h.removeByForce(nil)
	h.settle(nil)
	if h.records[nodeA] != nil {
		t.Errorf("the source keeps %+v", h.records[nodeA])
	}
}
