package apply

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// fields are those of a manager, as FieldsV1 has them: a tree of names.
type fields = map[string]any

// restartedAt is how `kubectl rollout restart` replaces pods. That it may do.
const restartedAt = "f:kubectl.kubernetes.io/restartedAt"

// addedToTemplate says whether something is to go from the pod template of an object.
func (a *Applier) addedToTemplate(ctx context.Context, want, live *unstructured.Unstructured) (bool, error) {
	_, has, err := unstructured.NestedMap(want.Object, "spec", "template")
	if err != nil || !has || live.GetDeletionTimestamp() != nil || want.GetKind() == "Job" {
		return false, err
	}
	return a.ownTemplate(ctx, live)
}

// ownTemplate makes all fields of a pod template those of the operator, whoever has set them, so that those which are not wanted go with the
// next apply. It says whether there were any. A field under the operator's own name was added by a webhook that changes what is applied,
// and would come back each time.
func (a *Applier) ownTemplate(ctx context.Context, live *unstructured.Unstructured) (found bool, err error) {
	managers := live.GetManagedFields()
	applied := slices.IndexFunc(managers, func(m metav1.ManagedFieldsEntry) bool {
		return m.Manager == FieldManager && m.Operation == metav1.ManagedFieldsOperationApply && m.Subresource == "" && m.FieldsV1 != nil
	})
	if applied < 0 {
		return false, nil // there will be, with the first apply
	}
	taken := fields{}
	for i, entry := range managers {
		if entry.Manager == FieldManager || entry.Subresource != "" || entry.FieldsV1 == nil {
			continue
		}
		rest, template, err := cutTemplate(entry.FieldsV1)
		if err != nil {
			return false, fmt.Errorf("read the fields of %s in %s: %w", entry.Manager, Describe(live), err)
		}
		if len(template) > 0 {
			merge(taken, template)
			managers[i].FieldsV1 = rest
		}
	}
	if len(taken) == 0 {
		return false, nil
	}
	if err := addTemplate(&managers[applied], taken); err != nil {
		return false, fmt.Errorf("read the operator's fields in %s: %w", Describe(live), err)
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

// cutTemplate takes what a manager has of a pod template out of its fields.
func cutTemplate(of *metav1.FieldsV1) (rest *metav1.FieldsV1, template fields, err error) {
	all := fields{}
	if err := json.Unmarshal(of.GetRawBytes(), &all); err != nil {
		return nil, nil, err
	}
	spec, _ := all["f:spec"].(fields)
	template, _ = spec["f:template"].(fields)
	kept := cutRestart(template)
	delete(template, ".")
	if len(template) == 0 {
		return of, nil, nil
	}
	delete(spec, "f:template")
	if kept != nil {
		spec["f:template"] = kept
	}
	if len(spec) == 0 {
		delete(all, "f:spec")
	}
	text, err := json.Marshal(all)
	if err != nil {
		return nil, nil, err
	}
	rest = &metav1.FieldsV1{}
	rest.SetRawBytes(text)
	return rest, template, nil
}

// cutRestart takes the annotation of a restart out of a template, and returns it as a template of its own.
func cutRestart(template fields) fields {
	metadata, _ := template["f:metadata"].(fields)
	annotations, _ := metadata["f:annotations"].(fields)
	value, has := annotations[restartedAt]
	if !has {
		return nil
	}
	delete(annotations, restartedAt)
	delete(annotations, ".")
	if len(annotations) == 0 {
		delete(metadata, "f:annotations")
	}
	if len(metadata) == 0 {
		delete(template, "f:metadata")
	}
	return fields{"f:metadata": fields{"f:annotations": fields{restartedAt: value}}}
}

// addTemplate adds fields of a pod template to those of a manager.
func addTemplate(to *metav1.ManagedFieldsEntry, taken fields) error {
	all := fields{}
	if err := json.Unmarshal(to.FieldsV1.GetRawBytes(), &all); err != nil {
		return err
	}
	merge(all, fields{"f:spec": fields{"f:template": taken}})
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	to.FieldsV1 = &metav1.FieldsV1{}
	to.FieldsV1.SetRawBytes(text)
	return nil
}

// merge adds one tree to another.
func merge(to, from fields) {
	for name, value := range from {
		below, _ := value.(fields)
		if mine, has := to[name].(fields); has && !reflect.DeepEqual(mine, below) {
			merge(mine, below)
			continue
		}
		to[name] = value
	}
}
