package operator

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/yaml"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// What looks as if the operator had made it, and has a name that its rights do not have, keeps neither a rollout nor a deletion waiting for
// ever. What the upstream operator left behind goes.
func TestObjectThatMayNotBeRemovedHoldsNothingUp(t *testing.T) {
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{
			Namespace: "storage", Name: name, Labels: render.Owned,
			Annotations:     map[string]string{"hostpathprovisioner.kubevirt.io/lastAppliedConfiguration": "{}"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: hppv1.GroupVersion.String(), Kind: hppv1.Kind, Name: "hpp", UID: "uid of hpp"}},
		}
	}
	other, left := &rbacv1.Role{ObjectMeta: meta("of-a-user")}, &rbacv1.Role{ObjectMeta: meta("hostpath-provisioner-health-check")}
	h := newHarness(t, stored("hpp", 1, false), other, left)
	rights := rightsByName(t)
	may := func(object client.Object) error {
		kind, err := h.GroupVersionKindFor(object)
		if names, limited := rights[strings.ToLower(kind.Kind)+"s"]; err == nil && limited && !names.Has(object.GetName()) {
			return apierrors.NewForbidden(rbacv1.Resource(kind.Kind), object.GetName(), nil)
		}
		return err
	}
	h.reconciler.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		Patch: func(ctx context.Context, api client.WithWatch, o client.Object, p client.Patch, options ...client.PatchOption) error {
			if err := may(o); err != nil {
				return err
			}
			return api.Patch(ctx, o, p, options...)
		},
		Delete: func(ctx context.Context, api client.WithWatch, o client.Object, options ...client.DeleteOption) error {
			if err := may(o); err != nil {
				return err
			}
			return api.Delete(ctx, o, options...)
		},
	})
	h.reconcile("hpp")
	if h.has(left) || !h.has(other) {
		t.Error("what the upstream operator left behind is there, or what a user has made is not")
	}
	must.Succeed(t, h.Delete(t.Context(), stored("hpp", 1, false)))
	h.reconcile("hpp")
	h.reconcile("hpp")
	if h.has(stored("hpp", 1, false)) || !h.has(other) {
		t.Error("the object is still there, or what a user has made is not")
	}
}

// rightsByName are the names that the operator may delete of each resource, where its rights are limited to some.
func rightsByName(t *testing.T) map[string]sets.Set[string] {
	t.Helper()
	text, err := os.ReadFile("../../deploy/operator/rbac.yaml")
	must.Succeed(t, err)
	found := map[string]sets.Set[string]{}
	for _, document := range strings.Split(string(text), "\n---\n") {
		role := rbacv1.Role{}
		must.Succeed(t, yaml.Unmarshal([]byte(document), &role))
		for _, rule := range role.Rules {
			if !slices.Contains(rule.Verbs, "delete") || len(rule.ResourceNames) == 0 {
				continue
			}
			for _, resource := range rule.Resources {
				if found[resource] == nil {
					found[resource] = sets.New[string]()
				}
				found[resource].Insert(rule.ResourceNames...)
			}
		}
	}
	return found
}

// What the operator tries to remove is what it has the right to.
func TestNamesAreThoseOfTheRights(t *testing.T) {
	rights := rightsByName(t)
	for kind, names := range render.Names {
		resource := strings.ToLower(kind) + "s"
		if kind == "SecurityContextConstraints" {
			resource = strings.ToLower(kind)
		}
		if want := sets.New(names...); !want.Equal(rights[resource]) {
			t.Errorf("of %s there are %v, and it may delete %v", kind, sets.List(want), sets.List(rights[resource]))
		}
	}
	for _, kind := range append(slices.Clone(ownedKinds), optionalKinds...) {
		if _, limited := render.Names[kind.Kind]; !limited && kind.Kind != "Deployment" && kind.Kind != "Job" {
			t.Errorf("a %s of any name is removed", kind.Kind)
		}
	}
}
