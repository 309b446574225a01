package webhook

import (
	"context"
	"encoding/json"
	"errors"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

const (
	// selectedNode is the annotation by which a node is chosen for the volume of a claim. The scheduler takes no other node
	// for pods with the claim, and external-provisioner makes the volume there, at once.
	// https://kubernetes.io/docs/reference/labels-annotations-taints/#volume-kubernetes-io-selected-node
	selectedNode = "volume.kubernetes.io/selected-node"
)

// Restores has claims that are made from a snapshot or from another claim made on the node that has it. The scheduler does not
// know which that is. A claim whose node cannot be found is left as it is.
type Restores struct {
	// Reader reads from the API server.
	Reader client.Reader
}

// Handle answers a call of the API server. It refuses no claim: what fails is logged.
func (r *Restores) Handle(ctx context.Context, request admission.Request) admission.Response {
	node, changed, err := r.place(ctx, request)
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "Failed to choose the node of a claim's source", "namespace", request.Namespace, "claim", request.Name)
	}
	if node == "" || err != nil {
		return admission.Allowed("")
	}
	return admission.PatchResponseFromRaw(request.Object.Raw, changed)
}

// place returns a claim with the annotation for its node, or no node.
func (r *Restores) place(ctx context.Context, request admission.Request) (node string, changed []byte, err error) {
	claim, object := &corev1.PersistentVolumeClaim{}, &unstructured.Unstructured{}
	if err := errors.Join(json.Unmarshal(request.Object.Raw, claim), object.UnmarshalJSON(request.Object.Raw)); err != nil {
		return "", nil, err
	}
	if node, err = r.nodeFor(ctx, request.Namespace, claim); node == "" || err != nil {
		return "", nil, err
	}
	metav1.SetMetaDataAnnotation(&claim.ObjectMeta, selectedNode, node)
	object.SetAnnotations(claim.Annotations)
	changed, err = object.MarshalJSON()
	return node, changed, err
}

// nodeFor is the node that a claim has to be made on, or empty if that is not known, or a node was chosen already.
func (r *Restores) nodeFor(ctx context.Context, namespace string, claim *corev1.PersistentVolumeClaim) (string, error) {
	find, name := r.finder(namespace, claim)
	if find == nil || claim.Spec.VolumeName != "" || claim.Annotations[selectedNode] != "" || claim.Spec.StorageClassName == nil {
		return "", nil
	}
	class := &storagev1.StorageClass{}
	if err := r.Reader.Get(ctx, client.ObjectKey{Name: *claim.Spec.StorageClassName}, class); err != nil || class.Provisioner != render.DriverName {
		return "", client.IgnoreNotFound(err)
	}
	node, err := find(ctx, client.ObjectKey{Namespace: namespace, Name: name})
	if node == "" || err != nil {
		return "", client.IgnoreNotFound(err)
	}
	// A claim for a node that is gone would wait for it.
	there := &metav1.PartialObjectMetadata{}
	there.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	if err := r.Reader.Get(ctx, client.ObjectKey{Name: node}, there); err != nil {
		return "", client.IgnoreNotFound(err)
	}
	return node, nil
}

// finder is what finds the node of a claim's source, with the name of that. It is nil for a claim without a source, and for one
// that the driver does not know. A source in another namespace is not read: the owner of the claim may not have the right to.
func (r *Restores) finder(namespace string, claim *corev1.PersistentVolumeClaim) (func(context.Context, client.ObjectKey) (string, error), string) {
	var group *string
	var kind, name string
	switch ref, old := claim.Spec.DataSourceRef, claim.Spec.DataSource; {
	case ref != nil && ref.Namespace != nil && *ref.Namespace != namespace:
		return nil, ""
	case ref != nil:
		group, kind, name = ref.APIGroup, ref.Kind, ref.Name
	case old != nil:
		group, kind, name = old.APIGroup, old.Kind, old.Name
	}
	core := group == nil || *group == ""
	switch {
	case core && kind == "PersistentVolumeClaim":
		return r.nodeOfClaim, name
	case !core && *group == place.SnapshotGroup && kind == "VolumeSnapshot":
		return r.nodeOfSnapshot, name
	}
	return nil, ""
}

func (r *Restores) nodeOfClaim(ctx context.Context, key client.ObjectKey) (string, error) {
	claim, volume := &corev1.PersistentVolumeClaim{}, &corev1.PersistentVolume{}
	if err := r.Reader.Get(ctx, key, claim); err != nil || claim.Spec.VolumeName == "" {
		return "", err
	}
	if err := r.Reader.Get(ctx, client.ObjectKey{Name: claim.Spec.VolumeName}, volume); err != nil {
		return "", err
	}
	if !place.OfDriver(volume) {
		return "", nil
	}
	return place.NodeOfVolume(volume), nil
}

func (r *Restores) nodeOfSnapshot(ctx context.Context, key client.ObjectKey) (string, error) {
	snapshot, content := ofSnapshots("VolumeSnapshot"), ofSnapshots("VolumeSnapshotContent")
	if err := r.Reader.Get(ctx, key, snapshot); err != nil {
		return "", err
	}
	bound, _, err := unstructured.NestedString(snapshot.Object, "status", "boundVolumeSnapshotContentName")
	if bound == "" || err != nil {
		return "", err
	}
	if err := r.Reader.Get(ctx, client.ObjectKey{Name: bound}, content); err != nil {
		return "", err
	}
	return place.NodeOfSnapshot(content)
}

func ofSnapshots(kind string) *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(schema.GroupVersionKind{Group: place.SnapshotGroup, Version: "v1", Kind: kind})
	return object
}
