package apply

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

var (
	// inTemplate selects the fields of a pod template.
	inTemplate = fieldpath.NewIncludeMatcherFilter(fieldpath.MakePrefixMatcherOrDie("spec", "template"))
	// restarted is how `kubectl rollout restart` replaces pods. That it may do.
	restarted = fieldpath.NewSet(fieldpath.MakePathOrDie("spec", "template", "metadata", "annotations", "kubectl.kubernetes.io/restartedAt"))
)

// addedToTemplate says whether something is to go from the pod template of an object. It makes all fields of the template those of the operator,
// whichever client has set them, so that those which are not wanted go with the next apply. A field under the operator's own name was added by a
// webhook that changes what is applied, and would come back each time.
func (a *Applier) addedToTemplate(ctx context.Context, want, live *unstructured.Unstructured) (found bool, err error) {
	_, has, err := unstructured.NestedMap(want.Object, "spec", "template")
	if err != nil || !has || want.GetKind() == "Job" {
		return false, err
	}
	managers := live.GetManagedFields()
	own, taken, err := takeTemplate(managers)
	if err == nil && own != nil && !taken.Empty() {
		err = changeFields(own, taken.Union)
	}
	if err != nil {
		return false, fmt.Errorf("read who owns the fields of %s: %w", Describe(live), err)
	}
	if own == nil || taken.Empty() {
		return false, nil // without a first apply there is nothing to add them to
	}
	patch, err := json.Marshal([]map[string]any{
		{"op": "replace", "path": "/metadata/managedFields", "value": managers},
		{"op": "replace", "path": "/metadata/resourceVersion", "value": live.GetResourceVersion()},
	})
	if err != nil {
		return false, err
	}
	err = a.Writer.Patch(ctx, live.DeepCopy(), client.RawPatch(types.JSONPatchType, patch), client.FieldOwner(FieldManager))
	switch {
	case apierrors.IsConflict(err):
		return false, nil // the cache is behind: there will be an event
	case err != nil:
		return false, fmt.Errorf("own the pod template of %s: %w", Describe(live), err)
	}
	return true, nil
}

// takeTemplate takes what other managers have of a pod template from them. It returns the entry of what the operator applies too.
func takeTemplate(managers []metav1.ManagedFieldsEntry) (own *metav1.ManagedFieldsEntry, taken *fieldpath.Set, err error) {
	taken = fieldpath.NewSet()
	for i := range managers {
		switch m := &managers[i]; {
		case m.Subresource != "" || m.FieldsV1 == nil:
		case m.Manager != FieldManager:
			err := changeFields(m, func(all *fieldpath.Set) *fieldpath.Set {
				if inTemplate.Filter(all.Leaves()).Difference(restarted).Empty() {
					return all // at most what the restart is in
				}
				theirs := inTemplate.Filter(all).Difference(restarted)
				taken = taken.Union(theirs)
				return all.Difference(theirs)
			})
			if err != nil {
				return nil, nil, err
			}
		case m.Operation == metav1.ManagedFieldsOperationApply:
			own = m
		}
	}
	return own, taken, nil
}

func changeFields(m *metav1.ManagedFieldsEntry, change func(*fieldpath.Set) *fieldpath.Set) error {
	fields := fieldpath.NewSet()
	if err := fields.FromJSON(bytes.NewReader(m.FieldsV1.GetRawBytes())); err != nil {
		return err
	}
	text, err := change(fields).ToJSON()
	m.FieldsV1 = &metav1.FieldsV1{}
	m.FieldsV1.SetRawBytes(text)
	return err
}
