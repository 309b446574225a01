package operator

import (
	"context"
	"errors"
	"fmt"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/apply"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// storageProfileKind is that of the objects by which the Containerized Data Importer (CDI) chooses how the disks of virtual machines are
// claimed and cloned. It makes one for each StorageClass, of the same name.
var storageProfileKind = schema.GroupVersionKind{Group: "cdi.kubevirt.io", Version: "v1beta1", Kind: "StorageProfile"}

// StorageProfiles are those of CDI in a cluster.
type storageProfiles struct {
	cluster *cluster
	kinds   *OptionalKinds
}

// complete completes the profiles of the classes of an object's pools, where CDI is installed. Where a user has set anything in the
// spec of a profile, that is the user's.
func (s storageProfiles) complete(ctx context.Context, object *hppv1.HostPathProvisioner) error {
	if !s.kinds.Has(storageProfileKind) {
		return nil
	}
	classes, err := list[storagev1.StorageClass](ctx, s.cluster)
	if err != nil {
		return err
	}
	shared := map[string]bool{"": true} // the pool of no class
	for _, pool := range render.Pools(object) {
		shared[pool.Name] = pool.PVCTemplate != nil && pool.IsShared()
	}
	var problems []error
	for i := range classes {
		// CDI knows the classes of shared pools, by their parameter overlayCSI.
		if !shared[poolOfClass(render.Pools(object), &classes[i])] {
			problems = append(problems, s.completeOne(ctx, classes[i].Name, object.HasFeature(hppv1.Snapshotting)))
		}
	}
	return errors.Join(problems...)
}

func (s storageProfiles) completeOne(ctx context.Context, name string, snapshots bool) error {
	live := &unstructured.Unstructured{}
	live.SetGroupVersionKind(storageProfileKind)
	// CDI makes it soon after the class.
	if err := s.cluster.api.Get(ctx, client.ObjectKey{Name: name}, live); apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("read the StorageProfile %s: %w", name, err)
	}
	spec, want := live.Object["spec"], profileSpec(live, snapshots)
	if equality.Semantic.DeepEqual(spec, want) {
		return nil
	}
	if fields, _ := spec.(map[string]any); len(fields) > 0 && !ownsFields(live) {
		return nil
	}
	profile := &unstructured.Unstructured{Object: map[string]any{"spec": want}}
	profile.SetGroupVersionKind(storageProfileKind)
	profile.SetName(name)
	profile.SetUID(live.GetUID()) // so that it is not made
	err := s.cluster.Apply(ctx, client.ApplyConfigurationFromUnstructured(profile), client.FieldOwner(apply.FieldManager))
	// A conflict is over a field that a user has changed since.
	if err != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("complete the StorageProfile %s: %w", name, err)
	}
	return nil
}

// profileSpec asks for block volumes where a claim says nothing, for clones by reference, and for golden images that are snapshots, if the driver
// makes any and CDI has found a VolumeSnapshotClass.
func profileSpec(profile *unstructured.Unstructured, snapshots bool) map[string]any {
	mode := func(mode string) map[string]any {
		return map[string]any{"accessModes": []any{"ReadWriteOnce"}, "volumeMode": mode}
	}
	spec := map[string]any{"claimPropertySets": []any{mode("Block"), mode("Filesystem")}, "cloneStrategy": "csi-clone"}
	if class, _, _ := unstructured.NestedString(profile.Object, "status", "snapshotClass"); snapshots && class != "" {
		spec["dataImportCronSourceFormat"] = "snapshot"
	}
	return spec
}

// ownsFields says whether the operator has applied something of an object.
func ownsFields(object *unstructured.Unstructured) bool {
	for _, entry := range object.GetManagedFields() {
		if entry.Manager == apply.FieldManager {
			return true
		}
	}
	return false
}
