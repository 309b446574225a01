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

// rights are the verbs that the bindings give, by resource.group, with a slash in front if only in the namespace.
func rights(t *testing.T, objs manifest.Objects) map[string]string {
	t.Helper()
	rules, verbs, has := roles(t, objs), map[string][]string{}, map[string]string{}
	for _, b := range bindings(t, objs) {
		for _, rule := range rules[b.ref.Kind+" "+b.ref.Name] {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					name := strings.TrimSuffix(resource+"."+group, ".")
					if !b.clusterWide {
						name = "/" + name
					}
					verbs[name] = append(verbs[name], rule.Verbs...)
				}
			}
		}
	}
	for name, of := range verbs {
		slices.Sort(of)
		has[name] = strings.Join(slices.Compact(of), " ")
	}
	return has
}

// The whole of what the programs ask for. The cases of the cluster show that it suffices, and that each right is used.
func TestRights(t *testing.T) {
	for dir, want := range map[string]map[string]string{
		"csi": {
			"persistentvolumes":                    "create delete get list patch watch",
			"persistentvolumeclaims":               "get list update watch",
			"persistentvolumeclaims/status":        "patch",
			"storageclasses.storage.k8s.io":        "get list watch",
			"events":                               "create get list patch watch",
			"/csistoragecapacities.storage.k8s.io": "create delete get list update watch",
			"/pods":                                "get",
			"/leases.coordination.k8s.io":          "create get update",
		},
		"devices": {
			"nodes":                       "list watch",
			"persistentvolumes":           "create delete list patch watch",
			"events.events.k8s.io":        "create patch",
			"/configmaps":                 "list watch",
			"/leases.coordination.k8s.io": "create delete get list",
		},
		"provisioner": {
			"persistentvolumes":                         "create delete get list patch watch",
			"persistentvolumeclaims":                    "get list update watch",
			"storageclasses.storage.k8s.io":             "get list watch",
			"nodes":                                     "get",
			"daemonsets.apps":                           "list",
			"subjectaccessreviews.authorization.k8s.io": "create",
			"events": "create patch",
		},
		"single-node": {
			"persistentvolumes":             "create delete get list patch watch",
			"persistentvolumeclaims":        "get list watch",
			"storageclasses.storage.k8s.io": "get list watch",
			"nodes":                         "get list",
			"events":                        "create patch",
		},
		"migrate": {
			"persistentvolumes":             "create delete get list patch",
			"persistentvolumeclaims":        "create delete get",
			"pods":                          "list",
			"nodes":                         "list",
			"storageclasses.storage.k8s.io": "get",
		},
	} {
		t.Run(dir, func(t *testing.T) {
			if diff := cmp.Diff(want, rights(t, manifest.Render(t, deployDir+dir))); diff != "" {
				t.Errorf("(- want, + got):\n%s", diff)
			}
		})
	}
}

func TestRBACHasNoWildcards(t *testing.T) {
	for name, rules := range roles(t, manifest.Render(t, openshiftDir)) {
		for _, r := range rules {
			if strings.Contains(strings.Join(slices.Concat(r.APIGroups, r.Resources, r.Verbs), ""), "*") || len(r.NonResourceURLs) != 0 {
				t.Errorf("%s has a wildcard or URLs: %v", name, r)
			}
			for _, v := range []string{"escalate", "bind", "impersonate", "deletecollection"} {
				if slices.Contains(r.Verbs, v) {
					t.Errorf("%s may %s", name, v)
				}
			}
		}
	}
}

// Each role is there, and for the account of the pod alone. No other pod that names that of the driver gets its token.
func TestBindings(t *testing.T) {
	for _, p := range programs {
		t.Run(p.dir, func(t *testing.T) {
			objs := manifest.Render(t, deployDir+p.dir+"/openshift")
			sa := manifest.Only[corev1.ServiceAccount](t, objs, "ServiceAccount")
			if got := podOf(t, objs).ServiceAccountName; got != sa.Name || p.dir == "csi" && (sa.AutomountServiceAccountToken == nil || *sa.AutomountServiceAccountToken) {
				t.Errorf("the pod runs as %q, the account is %+v", got, sa)
			}
			unused := roles(t, objs)
			for _, b := range bindings(t, objs) {
				role := b.ref.Kind + " " + b.ref.Name
				if _, ok := roles(t, objs)[role]; !ok || b.ref.APIGroup != rbacv1.GroupName {
					t.Errorf("%s refers to %s of %q, which does not exist", b.name, role, b.ref.APIGroup)
				}
				delete(unused, role)
				want := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: sa.Name, Namespace: sa.Namespace}}
				if !slices.Equal(b.subjects, want) {
					t.Errorf("%s is for %+v, want %+v", b.name, b.subjects, want)
				}
			}
			if len(unused) > 0 {
				t.Errorf("bound to no account: %v", unused)
			}
		})
	}
}
