package move

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// change changes an object that is there.
func change[O client.Object](o O, do func(O)) func(*harness) {
	return func(h *harness) {
		h.has(o)
		do(o)
		h.update(o)
	}
}

func to(name string) func(*v1alpha1.VolumeMove) {
	return func(m *v1alpha1.VolumeMove) { m.Spec.TargetNode = name }
}

// What cannot move is refused in words, and begins nothing.
func TestRefusals(t *testing.T) {
	snapshot := &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"name": "content"},
		"spec":     map[string]any{"driver": "kubevirt.io.hostpath-provisioner", "source": map[string]any{"volumeHandle": "pvc-1"}},
	}}
	snapshot.SetGroupVersionKind(place.SnapshotContent)
	onlyA := func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"kubernetes.io/hostname": nodeA} }
	for name, tt := range map[string]struct {
		move   func(*v1alpha1.VolumeMove)
		before func(*harness)
		want   string
	}{
		"no claim":                               {func(m *v1alpha1.VolumeMove) { m.Spec.ClaimName = "other" }, nil, "there is no claim other"},
		"claim is not bound":                     {nil, change(claimOf("data"), func(c *corev1.PersistentVolumeClaim) { c.Status.Phase = corev1.ClaimPending }), "is not bound"},
		"another driver":                         {nil, change(volumeOf("pv"), func(v *corev1.PersistentVolume) { v.Spec.CSI.Driver = "other" }), "of another driver"},
		"another claim":                          {nil, change(volumeOf("pv"), func(v *corev1.PersistentVolume) { v.Spec.ClaimRef.UID = "other" }), "not bound to the claim"},
		"shared pool":                            {nil, change(volumeOf("pv"), func(v *corev1.PersistentVolume) { v.Spec.NodeAffinity = nil }), "on no single node"},
		"hostile handle":                         {nil, change(volumeOf("pv"), func(v *corev1.PersistentVolume) { v.Spec.CSI.VolumeHandle = "../$(X)" }), "the volume id"},
		"foreign finalizer":                      {nil, change(volumeOf("pv"), func(v *corev1.PersistentVolume) { v.Finalizers = append(v.Finalizers, "example.com/keep") }), "example.com/keep"},
		"snapshots":                              {nil, func(h *harness) { must.Succeed(h, h.api.Create(h.Context(), snapshot.DeepCopy())) }, "snapshots: LeaveBehind"},
		"another PersistentVolume":               {nil, func(h *harness) { h.leadByAnother(nodeA) }, "the PersistentVolume pv-2 leads to the same volume"},
		"another PersistentVolume for all nodes": {nil, func(h *harness) { h.leadByAnother("") }, "the PersistentVolume pv-2 leads to the same volume"},
		"to itself":                              {to(nodeA), nil, "has the volume"},
		"to no node":                             {to("node-x"), nil, "there is no node node-x"},
		"no room":                                {to(nodeB), change(capacity(nodeB, "1Gi"), func(c *storagev1.CSIStorageCapacity) { c.Capacity = capacity(nodeB, "1Gi").Capacity }), "1Gi of 10Gi"},
		"cordoned":                               {to(nodeB), change(node(nodeB), func(n *corev1.Node) { n.Spec.Unschedulable = true }), "cordoned"},
		"no driver":                              {to(nodeB), func(h *harness) { must.Succeed(h, h.api.Delete(h.Context(), driverPod(nodeB))) }, "the driver is not ready on node node-b"},
		"earlier driver":                         {to(nodeB), earlierDriver(nodeB), "the driver on node node-b has the image driver:v0, from before the last change of its DaemonSet"},
		"earlier driver has it":                  {to(nodeB), earlierDriver(nodeA), "the driver on node node-a has the image driver:v0"},
		"the driver goes": {nil, func(h *harness) {
			object := &v1beta1.HostPathProvisioner{ObjectMeta: metav1.ObjectMeta{Name: "hpp", Finalizers: []string{v1beta1.Finalizer}}}
			must.Succeed(h, h.api.Create(h.Context(), object), h.api.Delete(h.Context(), object))
		}, "the HostPathProvisioner hpp is being deleted"},
		"pod is pinned": {nil, change(appPod("data-0", false), onlyA), "no node can take the volume"},
		"taint": {to(nodeB), change(node(nodeB), func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}
		}), "does not tolerate the taint gpu"},
		"anti-affinity": {to(nodeB), func(h *harness) {
			apart := func(p *corev1.Pod) {
				p.Labels = map[string]string{"app": "db"}
				p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
					LabelSelector: &metav1.LabelSelector{MatchLabels: p.Labels}, TopologyKey: corev1.LabelHostname,
				}}}}
			}
			change(appPod("data-0", false), apart)(h)
			other := appPod("data-1", false)
			apart(other)
			other.Spec.NodeName, other.Spec.Volumes = nodeB, nil
			must.Succeed(h, h.api.Create(h.Context(), other))
		}, "pod data-0 may not run on node node-b, by the anti-affinity to pod data-1"},
		"topology of a class": {to(nodeB), change(class(), allow(nodeA)), "the topologies"},
		"claim of a pod": {nil, change(claimOf("data"), func(c *corev1.PersistentVolumeClaim) {
			c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "owner", UID: "o", Controller: ptr.To(true)}}
		}), "deleted with the pod owner"},
	} {
		t.Run(name, func(t *testing.T) {
			m := moveOf("m")
			if tt.move != nil {
				tt.move(m)
			}
			h := newHarness(t, m, appPod("data-0", false))
			if tt.before != nil {
				tt.before(h)
			}
			h.reconcile("m")
			if got := h.move("m"); got.Status.Phase != v1alpha1.Pending || len(got.Finalizers) > 0 || !strings.Contains(h.says("m"), tt.want) {
				t.Errorf("in the phase %s it says %q, want %q", got.Status.Phase, h.says("m"), tt.want)
			}
			h.wantNothingLeft()
			must.Succeed(t, h.api.Delete(t.Context(), moveOf("m")))
		})
	}
}

// leadByAnother has another claim have the volume, by a PersistentVolume that leads to a node, or to all.
func (h *harness) leadByAnother(node string) {
	h.Helper()
	another := volumeOf("pv-2")
	another.UID, another.Spec.NodeAffinity = "another", nil
	if node != "" {
		another.Spec.NodeAffinity = onNode(node)
	}
	another.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "other", Name: "data", UID: "claim other"}
	must.Succeed(h, client.IgnoreAlreadyExists(h.api.Create(h.Context(), another)))
}

// A volume that another PersistentVolume leads to from some time on is not taken from that: the move is undone. One that leads to a volume of
// the same name on another node keeps nothing.
func TestAnotherPersistentVolumeBeforeSwitch(t *testing.T) {
	for _, during := range []v1alpha1.Phase{v1alpha1.Copying, v1alpha1.Fenced} {
		for node, want := range map[string]string{nodeA: nodeA, "": nodeA, nodeC: nodeB} {
			t.Run(string(during)+" on "+node, func(t *testing.T) {
				h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
				h.run("m", func(int) {
					if h.move("m").Status.Phase == during {
						h.leadByAnother(node)
					}
				})
				h.wantOn(want)
				if says := h.says("m"); (want == nodeA) != strings.HasSuffix(says, ledByTwo("pv-2")) {
					t.Errorf("it says %q", says)
				}
				must.Succeed(t, h.api.Delete(t.Context(), moveOf("m")))
				h.reconcile("m")
			})
		}
	}
}

// Snapshots that an earlier move has left behind are on another node, and keep nothing where the volume is now.
func TestSnapshotsOnAnotherNodeKeepNothing(t *testing.T) {
	left := &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"name": "left", "labels": map[string]any{"snapshot.storage.kubernetes.io/managed-by": nodeB}},
		"spec":     map[string]any{"driver": "kubevirt.io.hostpath-provisioner", "source": map[string]any{"volumeHandle": "pvc-1"}},
		"status":   map[string]any{"snapshotHandle": "snapshot-1@" + nodeB},
	}}
	left.SetGroupVersionKind(place.SnapshotContent)
	h := newHarness(t, moveOf("m", to(nodeB)), appPod("data-0", false))
	must.Succeed(t, h.api.Create(t.Context(), left))
	h.run("m", func(look int) {
		if look == 20 && h.move("m").Status.Phase == v1alpha1.Pending {
			t.Fatalf("it waits: %s", h.says("m"))
		}
	})
	h.wantOn(nodeB)
}

// earlierDriver has a node still run what the DaemonSet was before.
func earlierDriver(on string) func(*harness) {
	return func(h *harness) {
		change(driverSet(), func(s *appsv1.DaemonSet) { s.Annotations = map[string]string{appsv1.DeprecatedTemplateGeneration: "2"} })(h)
		for _, name := range []string{nodeA, nodeB, nodeC} {
			change(driverPod(name), func(p *corev1.Pod) {
				p.Labels[templateGeneration] = "2"
				p.Spec.Containers = driverSet().Spec.Template.Spec.Containers
				if name == on {
					p.Labels[templateGeneration], p.Spec.Containers[1].Image = "1", "driver:v0"
				}
			})(h)
		}
	}
}

func allow(name string) func(*storagev1.StorageClass) {
	return func(c *storagev1.StorageClass) {
		c.AllowedTopologies = []corev1.TopologySelectorTerm{{MatchLabelExpressions: []corev1.TopologySelectorLabelRequirement{{Key: place.TopologyKey, Values: []string{name}}}}}
	}
}

// Two moves of one claim go one after the other.
func TestSecondMoveWaits(t *testing.T) {
	h := newHarness(t, moveOf("a"), moveOf("b"), appPod("data-0", false))
	h.run("a", func(int) {
		if h.move("a").Ended() {
			return
		}
		h.reconcile("b")
		if b := h.move("b"); b.Status.Phase != v1alpha1.Pending || !strings.Contains(h.says("b"), "VolumeMove a") {
			t.Fatalf("the second is %s: %q", b.Status.Phase, h.says("b"))
		}
	})
	h.wantOn(nodeB)
}

// So do two of one volume, which another claim in another namespace may have had when the first began: that one waits for the target's word, which a
// source would not give.
func TestSecondMoveOfVolumeWaits(t *testing.T) {
	first := begun(moveOf("first"), nodeA)
	first.Namespace, first.Spec.ClaimName, first.Status.VolumeHandle, first.Status.Phase = "another", "before", "pvc-1", v1alpha1.Removing
	h := newHarness(t, first, moveOf("m"), appPod("data-0", false))
	h.reconcile("m")
	if m := h.move("m"); m.Status.Phase != v1alpha1.Pending || !strings.Contains(h.says("m"), "VolumeMove first") {
		t.Errorf("the second is %s: %q", m.Status.Phase, h.says("m"))
	}
}

// For a move that has begun pods may stand still: those that wait to begin, of which a tenant may make thousands, do not hold it up.
func TestMovesThatWaitGoLast(t *testing.T) {
	h := newHarness(t, moveOf("a"), moveOf("b", func(m *v1alpha1.VolumeMove) { m.Spec.ClaimName = "none" }), appPod("data-0", false))
	r := &Reconciler{Client: h.Client, APIReader: h.api, Reports: h, DriverNamespace: storage}
	next := func(name string) int {
		t.Helper()
		result := must.Value(r.Reconcile(t.Context(), ctrl.Request{NamespacedName: types.NamespacedName{Namespace: space, Name: name}}))(t)
		if result.Priority == nil {
			t.Fatalf("the move %s has no priority", name)
		}
		return *result.Priority
	}
	if begun, waits := next("a"), next("b"); begun <= waits {
		t.Errorf("a move that has begun has the priority %d, and one that waits %d", begun, waits)
	}
}

// A pod that nothing makes again is evicted only if that was asked for, and one that a budget keeps is named.
func TestPodsThatStay(t *testing.T) {
	for name, tt := range map[string]struct {
		bare, keeps bool
		want        string
	}{
		"bare":   {true, false, "pod alone, which nothing makes again"},
		"budget": {false, true, "pod alone, which its disruption budget keeps"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, moveOf("m"), appPod("alone", tt.bare))
			h.replicas, h.keeps = false, tt.keeps
			h.run("m", func(look int) {
				if look != 20 {
					return
				}
				if said := h.says("m"); !strings.Contains(said, tt.want) || !h.has(appPod("alone", tt.bare)) {
					t.Fatalf("it says %q", said)
				}
				h.keeps = false
				change(moveOf("m"), func(m *v1alpha1.VolumeMove) { m.Spec.Force = true })(h)
			})
			h.wantOn(nodeB)
		})
	}
}

// What the target has of that name stays, and the move can be undone.
func TestNameIsTaken(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	h.records[nodeB] = &record{move: "other", role: "target"}
	h.run("m", func(look int) {
		if look == 15 {
			if !strings.Contains(h.says("m"), "the volume exists there") {
				t.Errorf("it says %q", h.says("m"))
			}
			must.Succeed(t, h.api.Delete(t.Context(), moveOf("m")))
		}
	})
	if h.records[nodeB] == nil {
		t.Error("what another move has made is gone")
	}
	delete(h.records, nodeB)
	h.wantOn(nodeA)
}
