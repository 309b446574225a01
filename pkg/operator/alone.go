package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
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
	var rights accountRights
	for i := range pods.Items {
		pod := &pods.Items[i]
		if runs := pod.Status.Phase == corev1.PodRunning; ended(pod) || at == "" && !runs {
			continue
		}
		if pod.Namespace == namespace {
			own = oldest(own, pod)
			continue
		}
		// Where the driver is, only its administrators make pods, and one that was applied elsewhere too has lost its rights to that.
		is := at != ""
		if !is {
			if is, err = rights.isOperator(ctx, api, pod); err != nil {
				return err
			}
		}
		if is {
			other = oldest(other, pod)
		}
	}
	if other == nil || at == "" && own != nil && oldest(other, own) == own {
		return nil
	}
	return &ElsewhereError{other.Namespace}
}

// accountRights are who may do what in the cluster, read once.
type accountRights struct {
	bindings *rbacv1.ClusterRoleBindingList
	// writing are the names of the roles that let an account write the status of HostPathProvisioners.
	writing sets.Set[string]
}

// isOperator says whether the account of a pod has the rights of an operator, which only an administrator gives: each user who can make pods
// can label them.
func (r *accountRights) isOperator(ctx context.Context, api client.Reader, pod *corev1.Pod) (bool, error) {
	if r.bindings == nil {
		if err := r.read(ctx, api); err != nil {
			return false, fmt.Errorf("look for the rights of operators in other namespaces: %w", err)
		}
	}
	account := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: pod.Namespace, Name: cmp.Or(pod.Spec.ServiceAccountName, "default")}
	return slices.ContainsFunc(r.bindings.Items, func(b rbacv1.ClusterRoleBinding) bool {
		return r.writing.Has(b.RoleRef.Name) && slices.ContainsFunc(b.Subjects, func(s rbacv1.Subject) bool {
			return s.Kind == account.Kind && s.Namespace == account.Namespace && s.Name == account.Name
		})
	}), nil
}

func (r *accountRights) read(ctx context.Context, api client.Reader) error {
	roles, bindings := &rbacv1.ClusterRoleList{}, &rbacv1.ClusterRoleBindingList{}
	if err := errors.Join(api.List(ctx, roles), api.List(ctx, bindings)); err != nil {
		return err
	}
	r.bindings, r.writing = bindings, sets.New[string]()
	for i := range roles.Items {
		if slices.ContainsFunc(roles.Items[i].Rules, writesObjects) {
			r.writing.Insert(roles.Items[i].Name)
		}
	}
	return nil
}

func writesObjects(rule rbacv1.PolicyRule) bool {
	has := func(all []string, one string) bool { return slices.Contains(all, "*") || slices.Contains(all, one) }
	return has(rule.APIGroups, hppv1.GroupVersion.Group) && (has(rule.Verbs, "update") || has(rule.Verbs, "patch")) &&
		(has(rule.Resources, "hostpathprovisioners/status") || slices.Contains(rule.Resources, "*/status"))
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
