package operator

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func operatorPod(namespace string, created int64, phase corev1.PodPhase) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "operator", Labels: operatorLabel, CreationTimestamp: metav1.Unix(created, 0)},
		Spec:       corev1.PodSpec{ServiceAccountName: "operator"},
		Status:     corev1.PodStatus{Phase: phase},
	}
}

// operatorRights are those that an operator in a namespace has in the cluster.
func operatorRights(namespace string) []client.Object {
	meta := metav1.ObjectMeta{Name: "operator-in-" + namespace}
	return []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"hostpathprovisioner.kubevirt.io"}, Resources: []string{"hostpathprovisioners/status"}, Verbs: []string{"update"}}}},
		&rbacv1.ClusterRoleBinding{ObjectMeta: meta, RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: meta.Name},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: "operator", Namespace: namespace}}},
	}
}

// Each of two operators would give its own driver the rights that the other one needs.
func TestSecondOperatorDoesNothing(t *testing.T) {
	first := operatorPod("storage", 1, corev1.PodRunning)
	h := newHarness(t, append(slices.Concat(operatorRights("storage"), operatorRights("other")), stored("hpp", 1, false), first, operatorPod("other", 2, corev1.PodRunning))...)
	h.reconcile("hpp")
	subjects := func() string {
		t.Helper()
		binding := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: render.DriverRole}}
		if !h.has(binding) || len(binding.Subjects) != 1 {
			t.Fatalf("the driver has no rights: %+v", binding)
		}
		return binding.Subjects[0].Namespace
	}
	before, _ := h.status()
	config := h.reconciler.Config
	config.Namespace = "other"
	second := &Reconciler{
		Client: h.reconciler.Client, APIReader: h.reconciler.APIReader, Recorder: h.reconciler.Recorder, Config: config,
		TLS: h.reconciler.TLS, Optional: h.reconciler.Optional, manifests: h.reconciler.manifests, kinds: h.reconciler.kinds,
	}
	stopped, stop := context.WithCancelCause(t.Context())
	second.Stop = stop
	_, err := second.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: "hpp"}})
	if found, is := errors.AsType[*ElsewhereError](err); !is || found.Namespace != "storage" || !errors.Is(context.Cause(stopped), err) {
		t.Errorf("the second one: %v, and it stops for %v", err, context.Cause(stopped))
	}
	if after, _ := h.status(); subjects() != "storage" || !cmp.Equal(before, after) {
		t.Errorf("the rights are those of %s, the status has changed by %s", subjects(), cmp.Diff(before, after))
	}
	// One that was removed has no pod.
	must.Succeed(t, h.Delete(t.Context(), first))
	_, err = second.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: "hpp"}})
	must.Succeed(t, err)
	if subjects() != "other" {
		t.Errorf("then the rights are those of %s", subjects())
	}
}

// Any user who can make pods can label one as an operator's. Only an administrator gives it the rights of one.
func TestCheckAlone(t *testing.T) {
	binding := func(namespace string) client.Object {
		return &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: render.DriverRole, Labels: render.Owned}, Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: "driver", Namespace: namespace}},
		}
	}
	now := time.Now().Unix()
	own, younger, older := operatorPod("storage", now, corev1.PodRunning), operatorPod("other", now+1, corev1.PodRunning), operatorPod("other", now-1, corev1.PodRunning)
	for name, c := range map[string]struct {
		objects []client.Object
		alone   bool
	}{
		"no other":                               {[]client.Object{own}, true},
		"nothing is deployed, and it is younger": {[]client.Object{own, younger}, true},
		"nothing is deployed, and it is older":   {[]client.Object{own, older}, false},
		"an older one that never ran":            {[]client.Object{own, operatorPod("other", now-1, corev1.PodPending)}, true},
		"the driver is here":                     {[]client.Object{own, older, binding("storage")}, true},
		"the driver is there":                    {[]client.Object{own, younger, binding("other")}, false},
		"it is just starting there again":        {[]client.Object{own, operatorPod("other", now+1, corev1.PodPending), binding("other")}, false},
		"it was removed there":                   {[]client.Object{own, binding("other")}, true},
		"it is in a third namespace":             {[]client.Object{own, younger, binding("third")}, true},
		"nothing but a label":                    {[]client.Object{own, operatorPod("tenant", now-1, corev1.PodRunning)}, true},
		"its rights were taken by another one":   {[]client.Object{own, operatorPod("first", now-1, corev1.PodRunning), binding("first")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			view := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "view"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"get"}}}}
			mayView := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "view"}, RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: "view"},
				Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: "operator", Namespace: "tenant"}}}
			err := CheckAlone(t.Context(), newHarness(t, append(slices.Concat(c.objects, operatorRights("other")), view, mayView)...), "storage")
			if _, found := errors.AsType[*ElsewhereError](err); found == c.alone || c.alone && err != nil {
				t.Errorf("%v, want it alone: %t", err, c.alone)
			}
		})
	}
}
