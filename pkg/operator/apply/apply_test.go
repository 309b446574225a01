package apply

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// refusing is an API server that, as the real one, refuses to have rollingUpdate beside Recreate.
func refusing(objects ...client.Object) client.Client {
	api := fake.NewClientBuilder().WithScheme(scheme.Scheme).WithObjects(objects...).Build()
	return interceptor.NewClient(api, interceptor.Funcs{
		Apply: func(ctx context.Context, api client.WithWatch, wanted runtime.ApplyConfiguration, options ...client.ApplyOption) error {
			for _, object := range objects {
				now := &appsv1.Deployment{}
				if err := api.Get(ctx, client.ObjectKeyFromObject(object), now); err != nil {
					return err
				}
				if now.Spec.Strategy.RollingUpdate != nil {
					return apierrors.NewInvalid(appsv1.SchemeGroupVersion.WithKind("Deployment").GroupKind(), now.Name, nil)
				}
			}
			return api.Apply(ctx, wanted, options...)
		},
	})
}

func TestChangedStrategyIsReset(t *testing.T) {
	some := intstr.FromString("25%")
	live := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "mounter"}}
	live.Spec.Strategy = appsv1.DeploymentStrategy{Type: appsv1.RollingUpdateDeploymentStrategyType, RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: &some}}
	api := refusing(live)
	a := &Applier{Reader: api, API: api, Writer: api, Changed: func(client.Object, string, error) {}}
	want := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apps/v1", "kind": "Deployment", "metadata": map[string]any{"namespace": "storage", "name": "mounter"},
		"spec": map[string]any{"strategy": map[string]any{"type": "Recreate"}},
	}}
	must.Succeed(t, a.Apply(t.Context(), want))
	must.Succeed(t, api.Get(t.Context(), client.ObjectKeyFromObject(live), live))
	if s := live.Spec.Strategy; s.Type != appsv1.RecreateDeploymentStrategyType || s.RollingUpdate != nil {
		t.Errorf("the strategy is %+v", s)
	}
}

// What is there keeps its selector, which cannot change, and its pods have the labels. A Service keeps its address.
func TestWhatCannotChangeIsKept(t *testing.T) {
	upstream := map[string]any{"of": "upstream"}
	want := object(t, wantedSet)
	live := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"selector": map[string]any{"matchLabels": upstream}}}}
	must.Succeed(t, keepFixed(want, live))
	selector, _, _ := unstructured.NestedMap(want.Object, "spec", "selector", "matchLabels")
	labels, _, _ := unstructured.NestedMap(want.Object, "spec", "template", "metadata", "labels")
	if diff := cmp.Diff([]any{upstream, map[string]any{"app": "driver", "of": "upstream"}}, []any{selector, labels}); diff != "" {
		t.Error(diff)
	}
	for address, kept := range map[string]bool{"None": true, "10.0.0.1": false} {
		want := object(t, "{apiVersion: v1, kind: Service, metadata: {name: metrics}, spec: {clusterIP: None}}")
		live := object(t, "{apiVersion: v1, kind: Service, metadata: {name: metrics}, spec: {clusterIP: "+address+"}}")
		must.Succeed(t, keepFixed(want, live))
		if _, has, _ := unstructured.NestedString(want.Object, "spec", "clusterIP"); has != kept {
			t.Errorf("with the address %s, that it has none is wanted: %v", address, has)
		}
	}
}

func object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	object := &unstructured.Unstructured{}
	must.Succeed(t, yaml.Unmarshal([]byte(text), &object.Object))
	return object
}
