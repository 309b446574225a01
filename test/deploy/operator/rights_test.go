package operator_test

import (
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

// The namespace may be one that others use too. What has a name that is known beforehand the operator may change and delete by that name
// alone. Mounters, their clean-ups and claims have the names of pools and nodes.
func TestOperatorChangesOnlyWhatItDeploys(t *testing.T) {
	installed := manifest.Render(t, "../../../deploy/operator")
	rules := slices.Concat(manifest.Named[rbacv1.ClusterRole](t, installed, "ClusterRole", "hostpath-provisioner-operator").Rules,
		manifest.Named[rbacv1.Role](t, installed, "Role", "hostpath-provisioner-operator").Rules)
	resources := map[string][2]string{
		"DaemonSet": {"apps", "daemonsets"}, "Service": {"", "services"}, "ServiceAccount": {"", "serviceaccounts"},
		"Role": {rbacv1.GroupName, "roles"}, "RoleBinding": {rbacv1.GroupName, "rolebindings"}, "ClusterRole": {rbacv1.GroupName, "clusterroles"},
		"ClusterRoleBinding": {rbacv1.GroupName, "clusterrolebindings"}, "CSIDriver": {"storage.k8s.io", "csidrivers"},
		"PrometheusRule": {"monitoring.coreos.com", "prometheusrules"}, "ServiceMonitor": {"monitoring.coreos.com", "servicemonitors"},
		"SecurityContextConstraints": {"security.openshift.io", "securitycontextconstraints"},
	}
	held := func(kind, name, verb string) bool {
		of := resources[kind]
		return slices.ContainsFunc(rules, func(r rbacv1.PolicyRule) bool { return gives(r, of[0], of[1], verb, name) })
	}
	for _, verb := range []string{"patch", "delete"} {
		for _, object := range operated(t, example(t, "legacy.yaml")) {
			if _, named := resources[object.Kind]; named && !held(object.Kind, object.Name, verb) {
				t.Errorf("the operator may not %s the %s %s", verb, object.Kind, object.Name)
			}
		}
		for kind := range resources {
			if held(kind, "of-a-user", verb) {
				t.Errorf("the operator may %s every %s", verb, kind)
			}
		}
	}
}

// gives says whether a rule gives a right to an object, or with an empty name to all.
func gives(rule rbacv1.PolicyRule, group, resource, verb, name string) bool {
	return slices.Contains(rule.APIGroups, group) && slices.Contains(rule.Resources, resource) && slices.Contains(rule.Verbs, verb) &&
		(len(rule.ResourceNames) == 0 || slices.Contains(rule.ResourceNames, name))
}

// The pod security standard restricted, which the API server of the cluster's cases checks, does not ask for this.
func TestOperatorCannotWriteToItsRoot(t *testing.T) {
	installed := manifest.Render(t, "../../../deploy/operator")
	for _, container := range manifest.Only[appsv1.Deployment](t, installed, "Deployment").Spec.Template.Spec.Containers {
		if root := container.SecurityContext.ReadOnlyRootFilesystem; root == nil || !*root {
			t.Errorf("%s can write to its root filesystem", container.Name)
		}
	}
}
