package operator

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	movev1 "kubevirt.io/hostpath-provisioner/api/v1alpha1"
	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// volumeOn is a volume of the driver on a node, as its provisioner makes it.
func volumeOn(name, node string, changes ...func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	volume := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{"kubernetes.io/pv-protection", "external-provisioner.volume.kubernetes.io/finalizer"}},
		Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			PersistentVolumeSource:        corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: render.DriverName, VolumeHandle: name}},
			ClaimRef:                      &corev1.ObjectReference{Namespace: "space", Name: "claim-of-" + name},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: place.TopologyKey, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
			}}}},
		},
		Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound},
	}
	for _, change := range changes {
		change(volume)
	}
	return volume
}

// ofProvisioner has a volume be one of the pre-CSI provisioner, KubeVirt's or ours (Provision of its
// cmd/provisioner/hostpath-provisioner.go).
func ofProvisioner(node string) func(*corev1.PersistentVolume) {
	return func(v *corev1.PersistentVolume) {
		v.Annotations = map[string]string{"pv.kubernetes.io/provisioned-by": render.LegacyName,
			"hostPathProvisionerIdentity": "kubevirt.io/hostpath-provisioner", "kubevirt.io/provisionOnNode": node}
		v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/old/" + v.Name}}
		v.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0] = corev1.NodeSelectorRequirement{
			Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}
	}
}

// annotated has an annotation of a volume say something else.
func annotated(key, value string) func(*corev1.PersistentVolume) {
	return func(v *corev1.PersistentVolume) { v.Annotations[key] = value }
}

// alsoOn has a volume of the driver be on one more node.
func alsoOn(node string) func(*corev1.PersistentVolume) {
	return func(v *corev1.PersistentVolume) {
		terms := &v.Spec.NodeAffinity.Required.NodeSelectorTerms
		*terms = append(*terms, volumeOn("", node).Spec.NodeAffinity.Required.NodeSelectorTerms...)
	}
}

// snapshotOn is a snapshot on a node, as the snapshot-controller makes it, of some driver.
func snapshotOn(name, node, driver string) unstructured.Unstructured {
	content := unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"driver": driver, "volumeSnapshotRef": map[string]any{"namespace": "space", "name": "of-" + name},
	}}}
	content.SetGroupVersionKind(place.SnapshotContent)
	content.SetName(name)
	content.SetLabels(map[string]string{"snapshot.storage.kubernetes.io/managed-by": node})
	return content
}

func released(v *corev1.PersistentVolume) { v.Status.Phase = corev1.VolumeReleased }
func foreign(v *corev1.PersistentVolume)  { v.Spec.CSI.Driver = "example.com" }

// Volumes and snapshots count for the node that all of them names, and of which nothing else is said.
func TestCountByNode(t *testing.T) {
	volumes := []corev1.PersistentVolume{
		*volumeOn("pv-2", "gone"), *volumeOn("pv-1", "gone", released), *volumeOn("pv-3", "here"), *volumeOn("pv-4", "", ofProvisioner("gone")), {},
		// Of these something is unknown, or says another node.
		*volumeOn("pv-5", "", ofProvisioner("gone"), annotated("hostPathProvisionerIdentity", "here")),
		*volumeOn("pv-6", "", ofProvisioner("gone"), annotated("kubevirt.io/provisionOnNode", "other")),
		*volumeOn("pv-7", "", ofProvisioner("gone"), annotated("kubevirt.io/provisionOnNode", "")),
		*volumeOn("pv-8", "gone", alsoOn("here")),
	}
	snapshots := []unstructured.Unstructured{
		snapshotOn("sc-2", "gone", render.DriverName), snapshotOn("sc-1", "gone", render.DriverName), snapshotOn("sc-3", "here", render.DriverName), snapshotOn("sc-4", "gone", "example.com"),
	}
	// Its handle says that a node has it which is there: its label is wrong.
	mislabelled := snapshotOn("sc-5", "gone", render.DriverName)
	mislabelled.Object["status"] = map[string]any{"snapshotHandle": "snapshot-5@here"}
	counts, err := countByNode(volumes, append(snapshots, mislabelled))
	must.Succeed(t, err)
	want := map[string]hppv1.DeletedNode{
		"gone": {Node: "gone", PersistentVolumes: 3, Claims: 2, VolumeSnapshotContents: 2},
		"here": {Node: "here", PersistentVolumes: 1, Claims: 1, VolumeSnapshotContents: 1},
	}
	if diff := cmp.Diff(want, counts); diff != "" {
		t.Error(diff)
	}
}

// A node that volumes name is reported from the reconciliation that its deletion leads to, to that of its return, and nothing of it is removed.
func TestDeletedNodeIsReported(t *testing.T) {
	object := stored("hpp", 1, false)
	node := nodeThat("flaps", corev1.ConditionTrue)
	volumes := []client.Object{volumeOn("bound", "flaps"), volumeOn("released", "flaps", released), volumeOn("legacy", "", ofProvisioner("flaps"))}
	h := newHarness(t, append(volumes, volumeOn("foreign", "flaps", foreign), volumeOn("not-ready", "down"), object, node, nodeThat("down", corev1.ConditionUnknown))...)
	reported := func() []hppv1.DeletedNode {
		h.reconcile("hpp")
		h.has(object)
		return object.Status.DeletedNodes
	}
	if before := reported(); len(before) > 0 {
		t.Errorf("while the node is there: %+v", before)
	}
	must.Succeed(t, h.Delete(t.Context(), node))
	if diff := cmp.Diff([]hppv1.DeletedNode{{Node: "flaps", PersistentVolumes: 3, Claims: 2}}, reported()); diff != "" {
		t.Error(diff)
	}
	must.Succeed(t, h.Create(t.Context(), nodeThat("flaps", corev1.ConditionTrue)))
	if back := reported(); len(back) > 0 {
		t.Errorf("when the node is back: %+v", back)
	}
	for _, volume := range volumes {
		h.has(volume)
	}
}

// Users make as many snapshots of other drivers as they like: none is kept in memory.
func TestSnapshotsOfOtherDriversAreNotKept(t *testing.T) {
	own, foreign := snapshotOn("own", "gone", render.DriverName), snapshotOn("foreign", "gone", "example.com")
	h := newHarness(t, &own, &foreign)
	found, err := h.reconciler.cluster().snapshots(t.Context())
	must.Succeed(t, err)
	if len(found) != 1 || found[0].GetName() != "own" {
		t.Errorf("it has %v", found)
	}
}

// A deletion that waits says which volumes still use what goes.
func TestDeletionWarnsOfVolumes(t *testing.T) {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "driver", Labels: map[string]string{render.AppLabel: render.App},
			OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: render.DriverDaemonSet}}},
		Spec: corev1.PodSpec{NodeName: "here"},
	}
	object := stored("hpp", 1, true)
	h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), pod, volumeOn("one", "here"), volumeOn("two", "here"),
		volumeOn("legacy", "", ofProvisioner("here")), volumeOn("foreign", "here", foreign))
	h.reconcile("hpp")
	h.has(object)
	condition := meta.FindStatusCondition(object.Status.Conditions, hppv1.ConditionAvailable)
	for _, want := range []string{"pod driver on here", "2 PersistentVolumes of the driver and all data stay", "1 PersistentVolume of the pre-CSI provisioner"} {
		if condition == nil || !strings.Contains(condition.Message, want) {
			t.Errorf("the condition is %+v, want it to say %q", condition, want)
		}
	}
}

// underway is a move of a volume's claim that has begun.
func underway(volume, from, to string, phase movev1.Phase) *movev1.VolumeMove {
	return &movev1.VolumeMove{ObjectMeta: metav1.ObjectMeta{Namespace: "space", Name: "move-of-" + volume}, Spec: movev1.VolumeMoveSpec{ClaimName: "claim-of-" + volume},
		Status: movev1.VolumeMoveStatus{Phase: phase, Volume: volume, SourceNode: from, TargetNode: to}}
}
