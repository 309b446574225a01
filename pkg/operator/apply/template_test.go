package apply

import (
	"context"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/test/must"
)

const wantedSet = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {namespace: storage, name: driver}
spec:
  selector: {matchLabels: {app: driver}}
  template:
    metadata: {labels: {app: driver}, annotations: {ours: "1"}}
    spec:
      containers:
      - name: driver
        image: driver:1
        env: [{name: OURS, value: "1"}]
`

// What a user adds to a pod template goes, wherever it is, with nothing else of what the user has set. Once it is gone nothing is written.
func TestPodTemplateIsOwnedAsAWhole(t *testing.T) {
	writes := 0
	api := interceptor.NewClient(fake.NewClientBuilder().WithScheme(scheme.Scheme).WithReturnManagedFields().Build(), interceptor.Funcs{
		Patch: func(ctx context.Context, api client.WithWatch, object client.Object, patch client.Patch, options ...client.PatchOption) error {
			writes++
			return api.Patch(ctx, object, patch, options...)
		},
		Apply: func(ctx context.Context, api client.WithWatch, wanted runtime.ApplyConfiguration, options ...client.ApplyOption) error {
			writes++
			return api.Apply(ctx, wanted, options...)
		},
	})
	a := &Applier{Reader: api, API: api, Writer: api, Changed: func(client.Object, string, error) {}}
	bring := func() *appsv1.DaemonSet {
		t.Helper()
		want := &unstructured.Unstructured{}
		must.Succeed(t, yaml.Unmarshal([]byte(wantedSet), &want.Object))
		must.Succeed(t, a.Apply(t.Context(), want))
		set := &appsv1.DaemonSet{}
		must.Succeed(t, api.Get(t.Context(), client.ObjectKeyFromObject(want), set))
		return set
	}
	set := bring()
	set.Labels = map[string]string{"theirs": "1"}
	set.Spec.MinReadySeconds = 1
	template := &set.Spec.Template
	template.Labels["theirs"] = "1"
	template.Annotations["theirs"] = "1"
	template.Annotations["kubectl.kubernetes.io/restartedAt"] = "now"
	template.Spec.HostNetwork = true
	template.Spec.Containers[0].Env = append(template.Spec.Containers[0].Env, corev1.EnvVar{Name: "something", Value: "true"})
	template.Spec.Containers = append(template.Spec.Containers, corev1.Container{Name: "theirs", Image: "theirs"})
	must.Succeed(t, api.Update(t.Context(), set, client.FieldOwner("kubectl-edit")))

	set = bring()
	template = &set.Spec.Template
	if len(template.Spec.Containers) != 1 || len(template.Spec.Containers[0].Env) != 1 || template.Spec.HostNetwork ||
		template.Labels["theirs"] != "" || template.Annotations["theirs"] != "" {
		t.Errorf("the template has something of a user: %+v", template)
	}
	if template.Annotations["kubectl.kubernetes.io/restartedAt"] != "now" || template.Annotations["ours"] != "1" {
		t.Errorf("the annotations are %v", template.Annotations)
	}
	if set.Labels["theirs"] != "1" || set.Spec.MinReadySeconds != 1 {
		t.Errorf("what a user has set beside the template is gone: %v, %d", set.Labels, set.Spec.MinReadySeconds)
	}
	before := writes
	if bring(); writes != before {
		t.Errorf("%d writes although nothing differs", writes-before)
	}
}
