package operator

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// operatorLabel selects the pods of an operator, of ours and of the upstream one.
var operatorLabel = client.MatchingLabels{"name": "hostpath-provisioner-operator"}

// An ElsewhereError says that there is another operator.
type ElsewhereError struct{ Namespace string }

func (e *ElsewhereError) Error() string {
	return fmt.Sprintf("the namespace %s has a hostpath-provisioner-operator too: remove one of the two", e.Namespace)
}

// CheckAlone returns an *ElsewhereError if there is an operator in another namespace that has deployed the driver there, or where none has, runs
// longer. Of two, each would write for its own driver what a cluster has once, for ever, and each would move volumes. Those of one namespace
// have a Lease.
func CheckAlone(ctx context.Context, api client.Reader, namespace string) error {
	at, err := deployedIn(ctx, api)
	if err != nil || at == namespace {
		return err
	}
	pods := &corev1.PodList{}
	if err := api.List(ctx, pods, client.InNamespace(at), operatorLabel); err != nil {
		return fmt.Errorf("look for operators in other namespaces: %w", err)
	}
	var own, other *corev1.Pod
	for i := range pods.Items {
		pod := &pods.Items[i]
		switch runs := pod.Status.Phase == corev1.PodRunning; {
		case ended(pod), at == "" && !runs:
		case pod.Namespace == namespace:
			own = oldest(own, pod)
		default:
			other = oldest(other, pod)
		}
	}
	if other == nil || at == "" && own != nil && oldest(other, own) == own {
		return nil
	}
	return &ElsewhereError{other.Namespace}
}

func oldest(a, b *corev1.Pod) *corev1.Pod {
	if a == nil || b.CreationTimestamp.Before(&a.CreationTimestamp) || b.CreationTimestamp.Equal(&a.CreationTimestamp) && b.Namespace < a.Namespace {
		return b
	}
	return a
}

// deployedIn is the namespace of the driver that has its rights in the cluster from an operator, or empty.
func deployedIn(ctx context.Context, api client.Reader) (string, error) {
	kind := rbacv1.SchemeGroupVersion.WithKind("ClusterRoleBinding")
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	if err := api.List(ctx, list, client.MatchingLabels(render.Owned)); err != nil {
		return "", fmt.Errorf("look for the driver of another operator: %w", err)
	}
	for i := range list.Items {
		binding := &rbacv1.ClusterRoleBinding{}
		if list.Items[i].GetName() != render.DriverRole {
			continue
		}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(list.Items[i].Object, binding); err != nil {
			return "", err
		}
		if len(binding.Subjects) > 0 {
			return binding.Subjects[0].Namespace, nil
		}
	}
	return "", nil
}

// checkAlone asks the API server only if the driver is in another namespace. Beside another operator this one stops.
func (r *Reconciler) checkAlone(ctx context.Context, object *hppv1.HostPathProvisioner) error {
	at, err := deployedIn(ctx, r.Client)
	if err != nil || at == "" || at == r.Config.Namespace {
		return err
	}
	err = CheckAlone(ctx, r.APIReader, r.Config.Namespace)
	if _, found := errors.AsType[*ElsewhereError](err); found {
		ready.Set(noObject)
		r.reporter().event(object, corev1.EventTypeWarning, "AnotherOperator", fmt.Sprintf("The operator in the namespace %s does nothing: %v", r.Config.Namespace, err))
		r.Stop(err)
	}
	return err
}
