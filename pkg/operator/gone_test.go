package operator

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

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

// podOf is a pod on a node, or on none yet, that uses the claim of a volume.
func podOf(volume, node string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "space", Name: "of-" + volume}, Spec: corev1.PodSpec{NodeName: node, Volumes: []corev1.Volume{
		{VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim-of-" + volume}}}}}}
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
func retained(v *corev1.PersistentVolume) {
	v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
}
func unclaimed(v *corev1.PersistentVolume) { v.Spec.ClaimRef = nil }
func foreign(v *corev1.PersistentVolume)   { v.Spec.CSI.Driver = "example.com" }

// A node is reported once it has been gone for long enough, and not any more when it is back.
func TestGoneNodes(t *testing.T) {
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
	snapshots = append(snapshots, mislabelled)
	left, err := leftOn(sets.New("here"), volumes, snapshots)
	must.Succeed(t, err)
	g := &goneNodes{}
	now := time.Now()
	if found := g.note(left, GoneAfter, now); len(found) > 0 {
		t.Errorf("reported at once: %v", found)
	}
	found := g.note(left, GoneAfter, now.Add(GoneAfter))
	if len(found) != 1 {
		t.Fatalf("after %v %d nodes are gone, want 1", GoneAfter, len(found))
	}
	found[0].bound = sets.New("sc-1", "sc-2")
	// Not the claim of pv-1: what has its name by now is another one.
	want := hppv1.DeletedNode{Node: "gone", PersistentVolumes: 3, Claims: 2, VolumeSnapshotContents: 2, Command: "kubectl delete volumesnapshotcontent --wait=false sc-1 sc-2" +
		" && kubectl delete volumesnapshot --ignore-not-found --wait=false -n space of-sc-1 of-sc-2" +
		" && kubectl patch volumesnapshotcontent sc-1 sc-2 --type=merge -p '{\"metadata\":{\"finalizers\":null}}'" +
		" && kubectl delete pv --wait=false pv-1 pv-2 pv-4 && kubectl patch pv pv-1 pv-2 pv-4 --type=merge -p '{\"metadata\":{\"finalizers\":null}}'" +
		" && kubectl delete pvc --ignore-not-found --wait=false -n space claim-of-pv-2 claim-of-pv-4"}
	if diff := cmp.Diff(want, found[0].report()); diff != "" {
		t.Error(diff)
	}
	if found := g.note(nil, GoneAfter, now.Add(GoneAfter)); len(found) > 0 {
		t.Errorf("reported although it is back: %v", found)
	}
	if found := g.note(left, GoneAfter, now.Add(GoneAfter)); len(found) > 0 {
		t.Errorf("the time that it was gone before counts: %v", found)
	}
}

// Volumes of deleted nodes are offered for removal after a time, and nothing is removed. Nodes that are not ready, that are back, and what others have
// made are not offered.
func TestVolumesOfDeletedNodes(t *testing.T) {
	offered := []client.Object{
		volumeOn("bound", "gone"), volumeOn("held", "gone"), volumeOn("legacy", "", ofProvisioner("gone")), volumeOn("released", "gone", released),
		volumeOn("retained", "gone", retained), volumeOn("unclaimed", "gone", unclaimed), volumeOn("used-there", "gone"), volumeOn("waited-for", "gone"),
	}
	volumes := append([]client.Object{
		volumeOn("foreign", "gone", foreign), volumeOn("not-ready", "down"), volumeOn("ready", "here"), volumeOn("back", "back"),
		volumeOn("legacy-ready", "", ofProvisioner("here")), volumeOn("contradictory", "", ofProvisioner("gone"), annotated("kubevirt.io/provisionOnNode", "here")),
		volumeOn("used", "gone"),
	}, offered...)
	object := stored("hpp", 1, false)
	h := newHarness(t, append(volumes, podOf("used", "here"), podOf("waited-for", ""), podOf("used-there", "gone"), object, nodeThat("here", corev1.ConditionTrue), nodeThat("down", corev1.ConditionUnknown), nodeThat("back", corev1.ConditionTrue))...)
	h.reconciler.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{List: withoutNode("back")})
	now := time.Now()
	h.reconciler.Now = func() time.Time { return now }
	h.reconcile("hpp")
	if h.has(object); len(object.Status.DeletedNodes) > 0 {
		t.Fatalf("offered at once: %+v", object.Status.DeletedNodes)
	}
	now = now.Add(GoneAfter)
	h.reconcile("hpp")
	if gone := h.gone(volumes); len(gone) > 0 {
		t.Errorf("%q are removed", gone)
	}
	var names []string
	for _, volume := range offered {
		names = append(names, volume.GetName())
	}
	h.has(object)
	if left := object.Status.DeletedNodes; len(left) != 1 || left[0].Node != "gone" || left[0].PersistentVolumes != len(offered) ||
		!strings.HasPrefix(left[0].Command, "kubectl delete pv --wait=false "+strings.Join(names, " ")+" && ") {
		t.Errorf("the status reports %+v, want %q of the node gone", left, names)
	}
}

// A node that comes back was not gone, however shortly it is there: the time begins anew, also of one that nothing is reconciled for.
func TestNodeThatWasBackIsNotGone(t *testing.T) {
	object := stored("hpp", 1, false)
	h := newHarness(t, object, volumeOn("bound", "flaps"), nodeThat("here", corev1.ConditionTrue))
	begin := time.Now()
	now := begin
	h.reconciler.Now = func() time.Time { return now }
	node := nodeThat("flaps", corev1.ConditionTrue)
	for minute := range 16 {
		now = begin.Add(time.Duration(minute) * time.Minute)
		h.reconcile("hpp")
		if minute == 6 { // it is there for an instant
			for range 2 {
				h.reconciler.nodeChanged(t.Context(), node)
			}
		}
		if h.has(object); len(object.Status.DeletedNodes) > 0 {
			t.Fatalf("after %d minutes it is offered: %+v", minute, object.Status.DeletedNodes)
		}
	}
	now = now.Add(GoneAfter)
	h.reconcile("hpp")
	if h.has(object); len(object.Status.DeletedNodes) != 1 {
		t.Errorf("it is gone for good, and not offered")
	}
}

// A node that is back is not offered for removal any more, by the reconciliation that its return leads to, and also where it returns while it is
// looked for what names it.
func TestNodeThatIsBackIsNotOffered(t *testing.T) {
	for _, during := range []bool{false, true} {
		object := stored("hpp", 1, false)
		h := newHarness(t, object, volumeOn("bound", "flaps"), nodeThat("here", corev1.ConditionTrue))
		now, back := time.Now(), false
		h.reconciler.Now = func() time.Time { return now }
		h.reconciler.APIReader = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
			Get: func(ctx context.Context, api client.WithWatch, key client.ObjectKey, into client.Object, options ...client.GetOption) error {
				err := api.Get(ctx, key, into, options...)
				if _, is := into.(*corev1.Node); is && back {
					h.reconciler.nodeChanged(ctx, nodeThat("flaps", corev1.ConditionTrue))
				}
				return err
			}})
		h.reconcile("hpp")
		now, back = now.Add(GoneAfter), during
		h.reconcile("hpp")
		if h.has(object); len(object.Status.DeletedNodes) > 0 == during {
			t.Errorf("back during the check: %v, offered: %+v", during, object.Status.DeletedNodes)
		}
		h.reconciler.nodeChanged(t.Context(), nodeThat("flaps", corev1.ConditionTrue))
		now = now.Add(time.Minute)
		h.reconcile("hpp")
		if h.has(object); len(object.Status.DeletedNodes) > 0 {
			t.Errorf("a minute after the node is back: %+v", object.Status.DeletedNodes)
		}
	}
}

// A node of which the API server does not say whether it is there may have pods that use the volumes.
func TestVolumesOfDeletedNodes_stayWhileANodeCannotBeRead(t *testing.T) {
	object := stored("hpp", 1, false)
	volumes := []client.Object{volumeOn("used", "gone"), volumeOn("unused", "gone")}
	h := newHarness(t, append(volumes, podOf("used", "here"), object, nodeThat("here", corev1.ConditionTrue))...)
	h.reconciler.APIReader = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, api client.WithWatch, key client.ObjectKey, into client.Object, options ...client.GetOption) error {
			if _, is := into.(*corev1.Node); is && key.Name == "here" {
				return apierrors.NewInternalError(errors.New("not now"))
			}
			return api.Get(ctx, key, into, options...)
		}})
	now := time.Now()
	h.reconciler.Now = func() time.Time { return now }
	for range 2 {
		if found, err := h.reconciler.deletedNodes(t.Context()); len(found) > 0 {
			t.Errorf("offered: %+v (%v)", found, err)
		}
		now = now.Add(GoneAfter)
	}
	if _, err := h.reconciler.deletedNodes(t.Context()); err == nil || !strings.Contains(err.Error(), "not now") {
		t.Errorf("the error is %v", err)
	}
	if gone := h.gone(volumes); len(gone) > 0 {
		t.Errorf("removed: %q", gone)
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

// A VolumeSnapshot that was made anew by the name of one of a deleted node is one of another node.
func TestSnapshotsOfDeletedNodes_areRemovedWithTheirOwnVolumeSnapshot(t *testing.T) {
	object := stored("hpp", 1, false)
	objects := []client.Object{object, nodeThat("here", corev1.ConditionTrue)}
	for name, uid := range map[string]types.UID{"own": "uid of own", "anew": "another", "unborn": "uid of unborn"} {
		content := snapshotOn(name, "gone", render.DriverName)
		ref := content.Object["spec"].(map[string]any)["volumeSnapshotRef"].(map[string]any)
		if ref["uid"] = "uid of " + name; name == "unborn" {
			delete(ref, "uid") // an administrator's, that is not bound
		}
		snapshot := empty(place.Snapshot)
		snapshot.SetNamespace("space")
		snapshot.SetName("of-" + name)
		snapshot.SetUID(uid)
		objects = append(objects, &content, snapshot)
	}
	deleted := snapshotOn("deleted", "gone", render.DriverName)
	h := newHarness(t, append(objects, &deleted)...)
	h.reconciler.Optional.present = append(h.reconciler.Optional.present, place.SnapshotContent)
	now := time.Now()
	h.reconciler.Now = func() time.Time { return now }
	h.reconcile("hpp")
	now = now.Add(GoneAfter)
	h.reconcile("hpp")
	h.has(object)
	if left := object.Status.DeletedNodes; len(left) != 1 || !strings.HasPrefix(left[0].Command, "kubectl delete volumesnapshotcontent --wait=false anew deleted own unborn && ") ||
		!strings.Contains(left[0].Command, " && kubectl delete volumesnapshot --ignore-not-found --wait=false -n space of-own && ") {
		t.Errorf("the status reports %+v", left)
	}
}

// gone are the names of those volumes that are not there any more.
func (h *harness) gone(volumes []client.Object) []string {
	h.t.Helper()
	var names []string
	for _, volume := range volumes {
		err := h.Get(h.t.Context(), client.ObjectKeyFromObject(volume), &corev1.PersistentVolume{})
		if apierrors.IsNotFound(err) {
			names = append(names, volume.GetName())
		} else if err != nil {
			h.t.Fatal(err)
		}
	}
	return names
}

// withoutNode is a cache that does not have a node yet.
func withoutNode(name string) func(context.Context, client.WithWatch, client.ObjectList, ...client.ListOption) error {
	return func(ctx context.Context, api client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
		err := api.List(ctx, list, options...)
		if nodes, ok := list.(*metav1.PartialObjectMetadataList); ok {
			for i := range nodes.Items {
				if nodes.Items[i].Name == name {
					nodes.Items[i].Name = "not " + name
				}
			}
		}
		return err
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

// While a volume moves, another node may have all of it, or the last copy: its PersistentVolume and its claim are not offered for removal until the
// move has ended.
func TestVolumesOfDeletedNodes_stayWhileTheyMove(t *testing.T) {
	object := stored("hpp", 1, false)
	var volumes, objects []client.Object
	for _, phase := range movev1.Phases {
		name := strings.ToLower(string(phase))
		volumes = append(volumes, volumeOn(name, "gone"))
		objects = append(objects, underway(name, "gone", "here", phase))
	}
	volumes, objects = append(volumes, volumeOn("forced", "gone")), append(objects, forsaken("forced", "here", "gone"))
	retains := volumeOn("retains", "gone", retained)
	h := newHarness(t, append(append(objects, volumes...), retains, underway("retains", "here", "gone", movev1.Removing), object, nodeThat("here", corev1.ConditionTrue))...)
	now := time.Now()
	h.reconciler.Now = func() time.Time { return now }
	h.reconcile("hpp")
	now = now.Add(GoneAfter)
	h.reconcile("hpp")
	h.has(object)
	if left := object.Status.DeletedNodes; len(left) != 1 || !strings.HasPrefix(left[0].Command, "kubectl delete pv --wait=false failed pending succeeded && ") {
		t.Errorf("the status offers %+v", left)
	}
}
