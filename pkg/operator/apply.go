package operator

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/csaupgrade"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// An applier brings the objects of the cluster to what is wanted. It writes only what differs.
type applier struct {
	// reader has a cache of all objects with the labels of the operator.
	reader client.Reader
	writer client.Client
	// changed is called for each object that was made, changed or removed.
	changed func(object *unstructured.Unstructured, reason string, err error)
}

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

// apply makes one object what is wanted.
func (a *applier) apply(ctx context.Context, want *unstructured.Unstructured) error {
	if err := stamp(want); err != nil {
		return err
	}
	live := &unstructured.Unstructured{}
	live.SetGroupVersionKind(want.GroupVersionKind())
	err := a.reader.Get(ctx, client.ObjectKeyFromObject(want), live)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read %s: %w", describe(want), err)
	}
	done, failed := reasonCreated, reasonCreateFailed
	if err == nil {
		if live.GetDeletionTimestamp() != nil || includes(want.GetKind(), live.Object, want.Object) {
			return nil
		}
		done, failed = reasonUpdated, reasonUpdateFailed
		if err := a.takeOver(ctx, live); err != nil {
			a.changed(want, failed, err)
			return err
		}
	}
	if err := a.write(ctx, want); err != nil {
		a.changed(want, failed, err)
		return fmt.Errorf("apply %s: %w", describe(want), err)
	}
	// The cache may be behind: then the object was as it should be already.
	if want.GetResourceVersion() != live.GetResourceVersion() {
		a.changed(want, done, nil)
	}
	return nil
}

func (a *applier) write(ctx context.Context, want *unstructured.Unstructured) error {
	apply := func() error {
		return a.writer.Apply(ctx, client.ApplyConfigurationFromUnstructured(want), client.FieldOwner(FieldManager), client.ForceOwnership)
	}
	err := apply()
	if apierrors.IsInvalid(err) && slices.Contains(replaceable, want.GetKind()) {
		if err := a.writer.Delete(ctx, want.DeepCopy()); client.IgnoreNotFound(err) != nil {
			return err
		}
		return apply()
	}
	return err
}

// takeOver makes the fields that the earlier operator owns those of this one, so that what is not wanted any more goes
// with the apply. The earlier one is known by its annotation, whatever its name.
func (a *applier) takeOver(ctx context.Context, live *unstructured.Unstructured) error {
	if _, earlier := live.GetAnnotations()[earlierAnnotation]; !earlier {
		return nil
	}
	managers := sets.New[string]()
	for _, entry := range live.GetManagedFields() {
		if entry.Operation == metav1.ManagedFieldsOperationUpdate && entry.Subresource == "" && entry.FieldsV1 != nil &&
			strings.Contains(entry.FieldsV1.GetRawString(), earlierAnnotation) {
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
	if err := a.writer.Patch(ctx, live, client.RawPatch(types.JSONPatchType, patch), client.FieldOwner(FieldManager)); err != nil {
		return fmt.Errorf("take %s over from the earlier operator: %w", describe(live), err)
	}
	return nil
}

// stamp puts a digest of an object on it. By it a live object shows that it was made of the same, and has nothing of
// what an earlier version wanted.
func stamp(want *unstructured.Unstructured) error {
	annotations := want.GetAnnotations()
	delete(annotations, appliedAnnotation)
	want.SetAnnotations(annotations)
	text, err := json.Marshal(want.Object)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(text)
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[appliedAnnotation] = hex.EncodeToString(sum[:8])
	want.SetAnnotations(annotations)
	return nil
}

// prune removes the objects of some kinds that carry the operator's labels and are not wanted. keep has those that are.
func (a *applier) prune(ctx context.Context, namespace string, kinds []schema.GroupVersionKind, keep []*unstructured.Unstructured) error {
	wanted := map[string]bool{}
	for _, object := range keep {
		wanted[describe(object)] = true
	}
	var problems []error
	for _, kind := range kinds {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		if err := a.reader.List(ctx, list, client.MatchingLabels(owned)); err != nil {
			problems = append(problems, fmt.Errorf("list %s: %w", kind.Kind, err))
			continue
		}
		for i := range list.Items {
			object := &list.Items[i]
			elsewhere := object.GetNamespace() != "" && object.GetNamespace() != namespace
			// What has mounted a pool is removed once that is unmounted.
			if elsewhere || poolOf(object.GetLabels()) != "" || wanted[describe(object)] || object.GetDeletionTimestamp() != nil {
				continue
			}
			problems = append(problems, a.remove(ctx, object))
		}
	}
	return errors.Join(problems...)
}

func (a *applier) remove(ctx context.Context, object *unstructured.Unstructured) error {
	uid := object.GetUID()
	err := a.writer.Delete(ctx, object, client.PropagationPolicy(metav1.DeletePropagationBackground), client.Preconditions{UID: &uid})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		a.changed(object, reasonDeleteFailed, err)
		return fmt.Errorf("delete %s: %w", describe(object), err)
	}
	a.changed(object, reasonDeleted, nil)
	return nil
}

// describe names an object as messages do.
func describe(object *unstructured.Unstructured) string {
	if object.GetNamespace() == "" {
		return object.GetKind() + " " + object.GetName()
	}
	return object.GetKind() + " " + object.GetNamespace() + "/" + object.GetName()
}

// create makes an object that is not there, and leaves it alone from then on.
func (a *applier) create(ctx context.Context, want *unstructured.Unstructured) error {
	err := a.writer.Apply(ctx, client.ApplyConfigurationFromUnstructured(want), client.FieldOwner(FieldManager))
	if err != nil {
		a.changed(want, reasonCreateFailed, err)
		return fmt.Errorf("create %s: %w", describe(want), err)
	}
	a.changed(want, reasonCreated, nil)
	return nil
}
