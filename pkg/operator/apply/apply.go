// Package apply brings objects of a cluster to what is wanted, by server-side apply with one field manager.
package apply

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/csaupgrade"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// An Applier brings the objects of the cluster to what is wanted. It writes only what differs.
type Applier struct {
	// Reader has a cache of all objects with Labels, and API all objects.
	Reader, API client.Reader
	Writer      client.Client
	// Labels are on every object that belongs to the operator.
	Labels map[string]string
	// OwnerKind is the kind of what was the owner of such objects.
	OwnerKind string
	// Named says whether an object has a name by which it may be changed and removed. Prune leaves all others alone.
	Named func(object client.Object) bool
	// Spared are those of them that Prune keeps.
	Spared func(object client.Object) bool
	// Changed is called for each object that was made, changed or removed.
	Changed func(object client.Object, reason string, err error)
}

const (
	// FieldManager is the one field manager of all that the operator applies.
	FieldManager = "hostpath-provisioner-operator"

	// appliedAnnotation has a digest of what was applied, by which it is known that something is not wanted any more.
	appliedAnnotation = "hostpathprovisioner.kubevirt.io/applied"
	// upstreamAnnotation is on everything that the upstream operator has made.
	upstreamAnnotation = "hostpathprovisioner.kubevirt.io/lastAppliedConfiguration"
)

// Reasons of events about owned objects.
const (
	reasonCreated      = "CreateResourceSuccess"
	reasonCreateFailed = "CreateResourceFailed"
	reasonUpdated      = "UpdateResourceSuccess"
	reasonUpdateFailed = "UpdateResourceFailed"
	reasonDeleted      = "DeleteResourceSuccess"
	reasonDeleteFailed = "DeleteResourceFailed"
)

// replaceable are kinds of which an object is deleted and made anew if what differs cannot be changed. Nothing of a
// cluster is lost with them.
var replaceable = []string{"ClusterRoleBinding", "RoleBinding", "CSIDriver"}

// Apply makes one object what is wanted. Without an error, want then has the UID of the object.
func (a *Applier) Apply(ctx context.Context, want *unstructured.Unstructured) error {
	live := &unstructured.Unstructured{}
	live.SetGroupVersionKind(want.GroupVersionKind())
	err := a.Reader.Get(ctx, client.ObjectKeyFromObject(want), live)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read %s: %w", Describe(want), err)
	}
	done, failed, needed := reasonCreated, reasonCreateFailed, true
	if err == nil {
		done, failed = reasonUpdated, reasonUpdateFailed
		needed, err = a.prepare(ctx, want, live)
	} else {
		err = Stamp(want)
	}
	if err == nil && !needed {
		want.SetUID(live.GetUID())
		return nil
	}
	if err == nil {
		err = a.write(ctx, want)
	}
	if err != nil {
		a.Changed(want, failed, err)
		return fmt.Errorf("apply %s: %w", Describe(want), err)
	}
	// The cache may be behind: then the object was as it should be already.
	if want.GetResourceVersion() != live.GetResourceVersion() {
		a.Changed(want, done, nil)
	}
	return nil
}

// prepare has what is wanted keep what cannot change of a live object, and the live one own what is to go. It says whether they differ.
func (a *Applier) prepare(ctx context.Context, want, live *unstructured.Unstructured) (differ bool, err error) {
	if err := errors.Join(keepFixed(want, live), Stamp(want)); err != nil || live.GetDeletionTimestamp() != nil {
		return false, err
	}
	added, err := a.addedToTemplate(ctx, want, live)
	if err != nil || !added && includes(want.GetKind(), live.Object, want.Object) {
		return false, err
	}
	return true, a.takeOver(ctx, live)
}

func (a *Applier) write(ctx context.Context, want *unstructured.Unstructured) error {
	apply := func() error {
		return a.Writer.Apply(ctx, client.ApplyConfigurationFromUnstructured(want), client.FieldOwner(FieldManager), client.ForceOwnership)
	}
	err := apply()
	if !apierrors.IsInvalid(err) {
		return err
	}
	switch kind := want.GetKind(); {
	case slices.Contains(replaceable, kind):
		err = client.IgnoreNotFound(a.Writer.Delete(ctx, want.DeepCopy()))
	case kind == "Deployment" || kind == "DaemonSet" || kind == "Service":
		if found, keepErr := a.keepFixedOfUnlabelled(ctx, want); !found || keepErr != nil {
			return errors.Join(err, keepErr)
		}
		err = a.resetStrategy(ctx, want)
	}
	if err != nil {
		return err
	}
	return apply()
}

// keepFixedOfUnlabelled is for an object that has lost the labels by which the cache has it. There is no right to read it by its name.
func (a *Applier) keepFixedOfUnlabelled(ctx context.Context, want *unstructured.Unstructured) (found bool, err error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(want.GroupVersionKind().GroupVersion().WithKind(want.GetKind() + "List"))
	if err := a.API.List(ctx, list, client.InNamespace(want.GetNamespace())); err != nil {
		return false, err
	}
	for i := range list.Items {
		if list.Items[i].GetName() == want.GetName() {
			return true, errors.Join(keepFixed(want, &list.Items[i]), Stamp(want))
		}
	}
	return false, nil
}

// keepFixed takes over from a live object what cannot change: the selector, which that of the upstream operator is also for other pods, and
// whether a Service has an address.
func keepFixed(want, live *unstructured.Unstructured) error {
	switch want.GetKind() {
	case "DaemonSet", "Deployment":
		selector, found, err := unstructured.NestedStringMap(live.Object, "spec", "selector", "matchLabels")
		if err != nil || !found {
			return err
		}
		labels, _, err := unstructured.NestedStringMap(want.Object, "spec", "template", "metadata", "labels")
		if err != nil {
			return err
		}
		if labels == nil {
			labels = map[string]string{}
		}
		maps.Copy(labels, selector)
		return errors.Join(unstructured.SetNestedStringMap(want.Object, labels, "spec", "template", "metadata", "labels"),
			unstructured.SetNestedStringMap(want.Object, selector, "spec", "selector", "matchLabels"))
	case "Service":
		address, _, err := unstructured.NestedString(live.Object, "spec", "clusterIP")
		if address != corev1.ClusterIPNone {
			unstructured.RemoveNestedField(want.Object, "spec", "clusterIP")
		}
		return err
	}
	return nil
}

// resetStrategy has a Deployment replace its pods as is wanted. What the API server has filled in for another strategy has no owner, so
// that an apply leaves it, and is refused beside Recreate.
func (a *Applier) resetStrategy(ctx context.Context, want *unstructured.Unstructured) error {
	strategy, found, err := unstructured.NestedMap(want.Object, "spec", "strategy")
	if !found || err != nil {
		return err
	}
	if _, has := strategy["rollingUpdate"]; !has {
		strategy["rollingUpdate"] = nil
	}
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"strategy": strategy}})
	if err != nil {
		return err
	}
	return a.Writer.Patch(ctx, want.DeepCopy(), client.RawPatch(types.MergePatchType, patch), client.FieldOwner(FieldManager))
}

// takeOver makes the fields that the upstream operator owns those of this one, so that what is not wanted any more goes
// with the apply. The upstream one is known by its annotation, whatever its name.
func (a *Applier) takeOver(ctx context.Context, live *unstructured.Unstructured) error {
	if _, earlier := live.GetAnnotations()[upstreamAnnotation]; !earlier {
		return nil
	}
	managers := sets.New[string]()
	for _, entry := range live.GetManagedFields() {
		if entry.Operation == metav1.ManagedFieldsOperationUpdate && entry.Subresource == "" && entry.FieldsV1 != nil &&
			strings.Contains(entry.FieldsV1.GetRawString(), upstreamAnnotation) {
			managers.Insert(entry.Manager)
		}
	}
	if managers.Len() == 0 {
		return nil
	}
	patch, err := csaupgrade.UpgradeManagedFieldsPatch(live, managers, FieldManager)
	if err != nil || patch == nil {
		return err
	}
	if err := a.Writer.Patch(ctx, live, client.RawPatch(types.JSONPatchType, patch), client.FieldOwner(FieldManager)); err != nil {
		return fmt.Errorf("take %s over from the upstream operator: %w", Describe(live), err)
	}
	return nil
}

// Stamp puts a digest of an object on it. By it a live object shows that it was made of the same, and has nothing of
// what an earlier version wanted.
func Stamp(want *unstructured.Unstructured) error {
	unstructured.RemoveNestedField(want.Object, "metadata", "annotations", appliedAnnotation)
	if len(want.GetAnnotations()) == 0 {
		want.SetAnnotations(nil) // as before the first stamp
	}
	text, err := json.Marshal(want.Object)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(text)
	return unstructured.SetNestedField(want.Object, hex.EncodeToString(sum[:8]), "metadata", "annotations", appliedAnnotation)
}

// UpToDate says whether a live object is what was applied last, or is wanted now and has its stamp. It is not while a
// cache is behind, nor if the apply failed.
func UpToDate(live, want client.Object) bool {
	applied := want.GetAnnotations()[appliedAnnotation]
	return applied != "" && applied == live.GetAnnotations()[appliedAnnotation]
}

// Disown takes those owners off an object that are of a kind. Earlier versions and the upstream operator have set them, and with them a
// deletion of the owner in the foreground removes the object before the operator is asked.
func (a *Applier) Disown(ctx context.Context, object client.Object) error {
	owners := object.GetOwnerReferences()
	left := slices.DeleteFunc(slices.Clone(owners), func(o metav1.OwnerReference) bool { return o.Kind == a.OwnerKind })
	if len(left) == len(owners) || object.GetDeletionTimestamp() != nil {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"ownerReferences": left, "resourceVersion": object.GetResourceVersion()}})
	if err != nil {
		return err
	}
	changed, ok := object.DeepCopyObject().(client.Object)
	if !ok {
		return fmt.Errorf("%T is no object", object)
	}
	if err := a.Writer.Patch(ctx, changed, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take the owner off %s: %w", object.GetName(), err)
	}
	return nil
}

// Prune removes the objects of some kinds that carry the operator's labels and are not wanted. keep has those that are. What stays has
// no owner afterwards. What the API server would not let it remove is not tried: a refusal would keep everything else waiting for ever.
func (a *Applier) Prune(ctx context.Context, namespace string, kinds []schema.GroupVersionKind, keep []*unstructured.Unstructured) error {
	wanted := map[string]bool{}
	for _, object := range keep {
		wanted[Describe(object)] = true
	}
	var problems []error
	for _, kind := range kinds {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		if err := a.Reader.List(ctx, list, client.MatchingLabels(a.Labels)); err != nil {
			problems = append(problems, fmt.Errorf("list %s: %w", kind.Kind, err))
			continue
		}
		for i := range list.Items {
			object := &list.Items[i]
			elsewhere := object.GetNamespace() != "" && object.GetNamespace() != namespace
			switch {
			case elsewhere || object.GetDeletionTimestamp() != nil || !a.Named(object):
			case a.Spared(object) || wanted[Describe(object)] || !made(object):
				problems = append(problems, a.Disown(ctx, object))
			default:
				problems = append(problems, a.Remove(ctx, object))
			}
		}
	}
	return errors.Join(problems...)
}

// made says whether an object was made by this operator or by the upstream one. Labels alone do not show it: they are copied with what
// they are on.
func made(object *unstructured.Unstructured) bool {
	_, earlier := object.GetAnnotations()[upstreamAnnotation]
	return earlier || slices.ContainsFunc(object.GetManagedFields(), func(entry metav1.ManagedFieldsEntry) bool {
		return entry.Manager == FieldManager && entry.Operation == metav1.ManagedFieldsOperationApply
	})
}

// Remove deletes an object, if it is still the same one.
func (a *Applier) Remove(ctx context.Context, object client.Object) error {
	uid := object.GetUID()
	err := a.Writer.Delete(ctx, object, client.PropagationPolicy(metav1.DeletePropagationBackground), client.Preconditions{UID: &uid})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		a.Changed(object, reasonDeleteFailed, err)
		return fmt.Errorf("delete %s: %w", Describe(object), err)
	}
	a.Changed(object, reasonDeleted, nil)
	return nil
}

// Describe names an object as messages do.
func Describe(object client.Object) string {
	name := object.GetName()
	if object.GetNamespace() != "" {
		name = object.GetNamespace() + "/" + name
	}
	return object.GetObjectKind().GroupVersionKind().Kind + " " + name
}

// Create makes an object that is not there, and does not change it from then on.
func (a *Applier) Create(ctx context.Context, want *unstructured.Unstructured) error {
	err := a.Writer.Apply(ctx, client.ApplyConfigurationFromUnstructured(want), client.FieldOwner(FieldManager))
	if err != nil {
		a.Changed(want, reasonCreateFailed, err)
		return fmt.Errorf("create %s: %w", Describe(want), err)
	}
	a.Changed(want, reasonCreated, nil)
	return nil
}
