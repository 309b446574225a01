package deploy_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

// A binding is a RoleBinding or a ClusterRoleBinding.
type binding struct {
	name        string
	clusterWide bool
	ref         rbacv1.RoleRef
	subjects    []rbacv1.Subject
}

func bindings(t *testing.T, objs manifest.Objects) []binding {
	t.Helper()
	var bs []binding
	for _, b := range manifest.All[rbacv1.ClusterRoleBinding](t, objs, "ClusterRoleBinding") {
		bs = append(bs, binding{"ClusterRoleBinding " + b.Name, true, b.RoleRef, b.Subjects})
	}
	for _, b := range manifest.All[rbacv1.RoleBinding](t, objs, "RoleBinding") {
		bs = append(bs, binding{"RoleBinding " + b.Name, false, b.RoleRef, b.Subjects})
	}
	return bs
}

// roles are the rules of each role, by kind and name.
func roles(t *testing.T, objs manifest.Objects) map[string][]rbacv1.PolicyRule {
	t.Helper()
	rules := map[string][]rbacv1.PolicyRule{}
	for _, r := range manifest.All[rbacv1.ClusterRole](t, objs, "ClusterRole") {
		rules["ClusterRole "+r.Name] = r.Rules
		if r.AggregationRule != nil {
			t.Errorf("the rules of ClusterRole %s come from elsewhere", r.Name)
		}
	}
	for _, r := range manifest.All[rbacv1.Role](t, objs, "Role") {
		rules["Role "+r.Name] = r.Rules
	}
	return rules
}

// A right is one verb on one resource, in the driver's namespace or everywhere.
type right struct {
	resource    string // resource.group, or only resource for the core group
	verb        string
	clusterWide bool
}

// rights are what the bindings give.
func rights(t *testing.T, objs manifest.Objects) map[right]bool {
	t.Helper()
	rules := roles(t, objs)
	has := map[right]bool{}
	for _, b := range bindings(t, objs) {
		for _, rule := range rules[b.ref.Kind+" "+b.ref.Name] {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					for _, verb := range rule.Verbs {
						name := strings.TrimSuffix(resource+"."+group, ".")
						has[right{name, verb, b.clusterWide}] = true
					}
				}
			}
		}
	}
	return has
}

func TestRBACHasNoWildcards(t *testing.T) {
	for name, rules := range roles(t, manifest.Render(t, openshiftDir)) {
		for _, r := range rules {
			for _, s := range slices.Concat(r.APIGroups, r.Resources, r.Verbs) {
				if strings.Contains(s, "*") {
					t.Errorf("%s has a wildcard: %v", name, r)
				}
			}
			for _, s := range r.Resources {
				if strings.Contains(s, "/") && s != "persistentvolumeclaims/status" {
					t.Errorf("%s names a subresource: %s", name, s)
				}
			}
			for _, v := range []string{"escalate", "bind", "impersonate", "deletecollection"} {
				if slices.Contains(r.Verbs, v) {
					t.Errorf("%s may %s", name, v)
				}
			}
			if len(r.NonResourceURLs) != 0 {
				t.Errorf("%s names URLs: %v", name, r.NonResourceURLs)
			}
		}
	}
}

// The whole of what the sidecars ask for, and nothing that they do not.
func TestSidecarRBAC(t *testing.T) {
	want := map[right]bool{}
	add := func(clusterWide bool, resource string, verbs ...string) {
		for _, v := range verbs {
			want[right{resource, v, clusterWide}] = true
		}
	}
	add(true, "persistentvolumes", "get", "list", "watch", "create", "patch", "delete")
	add(true, "persistentvolumeclaims", "get", "list", "watch", "update")
	add(true, "persistentvolumeclaims/status", "patch")
	add(true, "storageclasses.storage.k8s.io", "get", "list", "watch")
	add(true, "events", "get", "list", "watch", "create", "patch")
	add(false, "csistoragecapacities.storage.k8s.io", "get", "list", "watch", "create", "update", "delete")
	add(false, "pods", "get")
	add(false, "leases.coordination.k8s.io", "get", "create", "update")

	got := rights(t, manifest.Render(t, csiDir))
	for r := range want {
		if !got[r] {
			t.Errorf("missing: %+v", r)
		}
	}
	for r := range got {
		if !want[r] {
			t.Errorf("too much: %+v", r)
		}
	}
}

// The resizer makes the name of its lease of that of the driver. Only the making
// of one cannot be held to a name.
func TestLeaseRuleNamesResizerLease(t *testing.T) {
	lease := "external-resizer-" + strings.ReplaceAll(driverName, ".", "-")
	want := []rbacv1.PolicyRule{{
		APIGroups:     []string{"coordination.k8s.io"},
		Resources:     []string{"leases"},
		ResourceNames: []string{lease},
		Verbs:         []string{"get", "update"},
	}, {
		APIGroups: []string{"coordination.k8s.io"},
		Resources: []string{"leases"},
		Verbs:     []string{"create"},
	}}
	if diff := cmp.Diff(want, roles(t, manifest.Render(t, csiDir))["Role hostpath-csi-resizer-leader"]); diff != "" {
		t.Errorf("(- want, + got):\n%s", diff)
	}
}

func TestBindings(t *testing.T) {
	objs := manifest.Render(t, openshiftDir)
	sa := manifest.Only[corev1.ServiceAccount](t, objs, "ServiceAccount")
	rules := roles(t, objs)
	used := map[string]bool{}
	for _, b := range bindings(t, objs) {
		role := b.ref.Kind + " " + b.ref.Name
		used[role] = true
		if _, ok := rules[role]; !ok || b.ref.APIGroup != rbacv1.GroupName {
			t.Errorf("%s refers to %s of %q, which does not exist", b.name, role, b.ref.APIGroup)
		}
		if len(b.subjects) != 1 {
			t.Errorf("%s has %d subjects, want 1", b.name, len(b.subjects))
		}
		for _, s := range b.subjects {
			want := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Name: sa.Name, Namespace: sa.Namespace}
			if s != want {
				t.Errorf("%s is for %+v, want %+v", b.name, s, want)
			}
		}
	}
	for role := range rules {
		if !used[role] {
			t.Errorf("%s is bound to no account", role)
		}
	}
}

func TestPodServiceAccount(t *testing.T) {
	objs := manifest.Render(t, csiDir)
	sa := manifest.Only[corev1.ServiceAccount](t, objs, "ServiceAccount")
	if got := daemonSet(t, objs).Spec.Template.Spec.ServiceAccountName; got != sa.Name {
		t.Errorf("the pod runs as %q, and the service account is %q", got, sa.Name)
	}
	if sa.AutomountServiceAccountToken == nil || *sa.AutomountServiceAccountToken {
		t.Error("any pod that names the service account gets its token")
	}
}
