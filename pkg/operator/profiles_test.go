package operator

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// profileOf is what CDI makes for a class.
func profileOf(class, snapshotClass string, spec map[string]any) *unstructured.Unstructured {
	profile := &unstructured.Unstructured{Object: map[string]any{"spec": spec, "status": map[string]any{"storageClass": class}}}
	if snapshotClass != "" {
		profile.Object["status"].(map[string]any)["snapshotClass"] = snapshotClass
	}
	profile.SetGroupVersionKind(storageProfileKind)
	profile.SetName(class)
	return profile
}

func classFor(name, provisioner, pool string) *storagev1.StorageClass {
	waits := storagev1.VolumeBindingWaitForFirstConsumer
	return &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: provisioner, Parameters: map[string]string{render.PoolParameter: pool}, VolumeBindingMode: &waits,
	}
}

func withSnapshots() *hppv1.HostPathProvisioner {
	object := stored("hpp", 1, false)
	object.Spec.FeatureGates = []string{hppv1.Snapshotting}
	return object
}

func withCDI(t *testing.T, objects ...client.Object) *harness {
	t.Helper()
	h := newHarness(t, objects...)
	h.reconciler.Optional.present = []schema.GroupVersionKind{storageProfileKind}
	return h
}

func (h *harness) profile(class string) (strategy, format, mode string) {
	h.t.Helper()
	profile := profileOf(class, "", nil)
	if !h.has(profile) {
		h.t.Fatalf("the profile %s is gone", class)
	}
	sets, _, err := unstructured.NestedSlice(profile.Object, "spec", "claimPropertySets")
	must.Succeed(h.t, err)
	if len(sets) > 0 {
		mode, _, _ = unstructured.NestedString(sets[0].(map[string]any), "volumeMode")
	}
	strategy, _, _ = unstructured.NestedString(profile.Object, "spec", "cloneStrategy")
	format, _, _ = unstructured.NestedString(profile.Object, "spec", "dataImportCronSourceFormat")
	return strategy, format, mode
}

func TestProfilesOfPoolsAreCompleted(t *testing.T) {
	for name, tt := range map[string]struct {
		class                  *storagev1.StorageClass
		profile                *unstructured.Unstructured
		strategy, format, mode string
	}{
		"left to CDI":    {classFor("disks", render.DriverName, "local"), profileOf("disks", "", map[string]any{}), "csi-clone", "", "Block"},
		"with snapshots": {classFor("disks", render.DriverName, "local"), profileOf("disks", "snapshots", map[string]any{}), "csi-clone", "snapshot", "Block"},
		// Its VolumeSnapshotClass outlives the gate, and no snapshot would ever be ready.
		"without the gate":  {classFor("disks", render.DriverName, "local"), profileOf("disks", "snapshots", map[string]any{}), "csi-clone", "", "Block"},
		"of a user":         {classFor("disks", render.DriverName, "local"), profileOf("disks", "", map[string]any{"cloneStrategy": "copy"}), "copy", "", ""},
		"of another driver": {classFor("disks", "example.com", "local"), profileOf("disks", "", map[string]any{}), "", "", ""},
		"of no pool":        {classFor("disks", render.DriverName, "other"), profileOf("disks", "", map[string]any{}), "", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			object := withSnapshots()
			if name == "without the gate" {
				object.Spec.FeatureGates = nil
			}
			h := withCDI(t, object, tt.class, tt.profile)
			h.reconcile("hpp")
			h.reconcile("hpp")
			if strategy, format, mode := h.profile("disks"); strategy != tt.strategy || format != tt.format || mode != tt.mode {
				t.Errorf("the profile has %q, %q and %q, want %q, %q and %q", strategy, format, mode, tt.strategy, tt.format, tt.mode)
			}
		})
	}
}

// What a user changes of a profile that was completed stays. What CDI finds later is added.
func TestCompletedProfileIsTheUsers(t *testing.T) {
	h := withCDI(t, withSnapshots(), classFor("disks", render.DriverName, "local"), profileOf("disks", "", map[string]any{}))
	h.reconcile("hpp")
	found := profileOf("disks", "", nil)
	must.Succeed(t, h.Patch(t.Context(), found, client.RawPatch("application/merge-patch+json", []byte(`{"status":{"snapshotClass":"snapshots"}}`)), client.FieldOwner("cdi")))
	h.reconcile("hpp")
	if _, format, _ := h.profile("disks"); format != "snapshot" {
		t.Errorf("with a VolumeSnapshotClass golden images are kept as %q, want snapshot", format)
	}
	must.Succeed(t, h.Patch(t.Context(), found, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"cloneStrategy":"copy"}}`)), client.FieldOwner("user")))
	h.reconcile("hpp")
	if strategy, _, mode := h.profile("disks"); strategy != "copy" || mode != "Block" {
		t.Errorf("the profile has %q and %q, want copy, as the user asked, and Block", strategy, mode)
	}
}

// A class of a shared pool is known to CDI, and a profile that is not there yet is left to it.
func TestProfilesOfOthersAreLeft(t *testing.T) {
	object := onClaims()
	object.Spec.StoragePools[0].PVCTemplate.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
	h := withCDI(t, object, classFor("shared", render.DriverName, object.Spec.StoragePools[0].Name), classFor("new", render.DriverName, object.Spec.StoragePools[0].Name),
		profileOf("shared", "", map[string]any{}))
	h.reconcile("hpp")
	if strategy, _, mode := h.profile("shared"); strategy != "" || mode != "" {
		t.Errorf("the profile of a shared pool has %q and %q", strategy, mode)
	}
	if h.has(profileOf("new", "", nil)) {
		t.Error("a profile was made, which CDI does")
	}
}
