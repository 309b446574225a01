package webhook

import (
	"encoding/json"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// boundClaim is one of the namespace apps, on a volume.
func boundClaim(name, volume string) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: name},
		Spec:       corev1.PersistentVolumeClaimSpec{VolumeName: volume},
	}
}

// volumeOn is a volume of the pool local that can be used on some nodes.
func volumeOn(name string, nodes ...string) *corev1.PersistentVolume {
	v := volumeOf(name, "local")
	v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: place.TopologyKey, Operator: corev1.NodeSelectorOpIn, Values: nodes}},
	}}}}
	return v
}

func snapshotOf(content string) *unstructured.Unstructured {
	s := ofSnapshots("VolumeSnapshot")
	s.SetNamespace("apps")
	s.SetName("snap")
	if content != "" {
		s.Object["status"] = map[string]any{"boundVolumeSnapshotContentName": content}
	}
	return s
}

func contentOf(driver, handle, label string) *unstructured.Unstructured {
	c := ofSnapshots("VolumeSnapshotContent")
	c.SetName("content")
	c.Object["spec"] = map[string]any{"driver": driver}
	c.Object["status"] = map[string]any{"snapshotHandle": handle}
	if label != "" {
		c.SetLabels(map[string]string{"snapshot.storage.kubernetes.io/managed-by": label})
	}
	return c
}

// asked is a claim as the API server sends it.
func asked(class string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	claim := &corev1.PersistentVolumeClaim{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolumeClaim"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: "restored"},
	}
	claim.Spec.StorageClassName = &class
	change(claim)
	return claim
}

func fromSnapshot(claim *corev1.PersistentVolumeClaim) {
	group := place.SnapshotGroup
	claim.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: "snap"}
}

func fromClaim(claim *corev1.PersistentVolumeClaim) {
	claim.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "data"}
}

// both is both changes.
func both(a, b func(*corev1.PersistentVolumeClaim)) func(*corev1.PersistentVolumeClaim) {
	return func(claim *corev1.PersistentVolumeClaim) { a(claim); b(claim) }
}

func TestRestores(t *testing.T) {
	const ours = render.DriverName
	populator, other := "example.com", "elsewhere"
	bound := []client.Object{snapshotOf("content"), contentOf(ours, "snapshot-1@b", "a")}
	clone := []client.Object{boundClaim("data", "pv"), volumeOn("pv", "a")}
	for name, tt := range map[string]struct {
		there []client.Object
		claim *corev1.PersistentVolumeClaim
		want  string
	}{
		"snapshot":                        {bound, asked("local", fromSnapshot), "a"},
		"snapshot without a label":        {[]client.Object{snapshotOf("content"), contentOf(ours, "snapshot-1@b", "")}, asked("local", fromSnapshot), "b"},
		"snapshot of the upstream driver": {[]client.Object{snapshotOf("content"), contentOf(ours, "snapshot-1", "")}, asked("local", fromSnapshot), ""},
		"snapshot on a node that is gone": {[]client.Object{snapshotOf("content"), contentOf(ours, "snapshot-1@gone", "")}, asked("local", fromSnapshot), ""},
		"snapshot that is not made yet":   {[]client.Object{snapshotOf("")}, asked("local", fromSnapshot), ""},
		"snapshot without its content":    {[]client.Object{snapshotOf("content")}, asked("local", fromSnapshot), ""},
		"snapshot that is not there":      {nil, asked("local", fromSnapshot), ""},
		"snapshot of another driver":      {[]client.Object{snapshotOf("content"), contentOf("ebs.csi.aws.com", "snap@b", "a")}, asked("local", fromSnapshot), ""},
		"claim":                           {clone, asked("local", fromClaim), "a"},
		"claim that is not bound":         {[]client.Object{boundClaim("data", "")}, asked("local", fromClaim), ""},
		"claim that is not there":         {nil, asked("local", fromClaim), ""},
		"claim of a shared pool":          {[]client.Object{boundClaim("data", "pv"), volumeOf("pv", "shared")}, asked("local", fromClaim), ""},
		"claim for several nodes":         {[]client.Object{boundClaim("data", "pv"), volumeOn("pv", "a", "b")}, asked("local", fromClaim), ""},
		"claim on another kind of volume": {[]client.Object{boundClaim("data", "pv"), localVolume("pv", "/a")}, asked("local", fromClaim), ""},
		"without a source":                {bound, asked("local", func(*corev1.PersistentVolumeClaim) {}), ""},
		"of another driver's class":       {bound, asked("foreign", fromSnapshot), ""},
		"of a class that is not there":    {bound, asked("none", fromSnapshot), ""},
		"bound by hand": {bound, asked("local", both(fromSnapshot, func(claim *corev1.PersistentVolumeClaim) {
			claim.Spec.VolumeName = "pv"
		})), ""},
		"on a node that the user has chosen": {bound, asked("local", both(fromSnapshot, func(claim *corev1.PersistentVolumeClaim) {
			claim.Annotations = map[string]string{selectedNode: "b"}
		})), ""},
		"with other annotations": {bound, asked("local", both(fromSnapshot, func(claim *corev1.PersistentVolumeClaim) {
			claim.Annotations = map[string]string{"example.com/a": "b"}
		})), "a"},
		"from another namespace": {clone, asked("local", both(fromClaim, func(claim *corev1.PersistentVolumeClaim) {
			claim.Spec.DataSourceRef.Namespace = &other
		})), ""},
		"of a populator": {clone, asked("local", both(fromClaim, func(claim *corev1.PersistentVolumeClaim) {
			claim.Spec.DataSourceRef.APIGroup = &populator
		})), ""},
	} {
		t.Run(name, func(t *testing.T) {
			there := append([]client.Object{
				class("local", ours, "local"), class("foreign", "ebs.csi.aws.com", ""),
				&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b"}},
			}, tt.there...)
			restores := &Restores{Reader: fake.NewClientBuilder().WithScheme(clientgoscheme.Scheme).WithObjects(there...).Build()}
			wantPlaced(t, restores.Handle(t.Context(), requestOf(t, tt.claim)), tt.want, tt.claim.Annotations == nil)
		})
	}
}

func requestOf(t *testing.T, claim *corev1.PersistentVolumeClaim) admission.Request {
	t.Helper()
	raw, err := json.Marshal(claim)
	must.Succeed(t, err)
	return admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		Namespace: claim.Namespace, Name: claim.Name, Operation: admissionv1.Create, Object: runtime.RawExtension{Raw: raw},
	}}
}

// wantPlaced says that an answer sets the annotation for a node and nothing else, or nothing.
func wantPlaced(t *testing.T, answer admission.Response, node string, first bool) {
	t.Helper()
	if !answer.Allowed {
		t.Errorf("the claim is refused: %v", answer.Result)
	}
	got, err := json.Marshal(answer.Patches)
	must.Succeed(t, err)
	want := "null"
	switch {
	case node != "" && first:
		want = `[{"op":"add","path":"/metadata/annotations","value":{"` + selectedNode + `":"` + node + `"}}]`
	case node != "":
		want = `[{"op":"add","path":"/metadata/annotations/volume.kubernetes.io~1selected-node","value":"` + node + `"}]`
	}
	if string(got) != want {
		t.Errorf("the patch is %s, want %s", got, want)
	}
}

// What is no claim, and an API server that does not answer, keep no user from making a claim.
func TestRestoreWebhookFailsOpen(t *testing.T) {
	unknown := &Restores{Reader: fake.NewClientBuilder().WithScheme(runtime.NewScheme()).Build()}
	wantPlaced(t, unknown.Handle(t.Context(), requestOf(t, asked("local", fromSnapshot))), "", true)
	wantPlaced(t, unknown.Handle(t.Context(), admission.Request{}), "", true)
}
