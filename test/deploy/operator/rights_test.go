package operator_test

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

// Kubernetes lets nobody grant a right that he does not have. The operator has all that it gives to what it deploys.
func TestOperatorHasRightsThatItGrants(t *testing.T) {
	installed := manifest.Render(t, "../../../deploy/operator")
	inCluster := manifest.Named[rbacv1.ClusterRole](t, installed, "ClusterRole", "hostpath-provisioner-operator").Rules
	inNamespace := slices.Concat(inCluster, manifest.Named[rbacv1.Role](t, installed, "Role", "hostpath-provisioner-operator").Rules)
	for _, object := range []string{
		example(t, "legacy.yaml"), strings.Replace(example(t, "snapshots.yaml"), "[Snapshotting]", "[Snapshotting, Freezing]", 1),
	} {
		deployed := operated(t, object)
		for _, role := range manifest.All[rbacv1.ClusterRole](t, deployed, "ClusterRole") {
			wantHeld(t, role.Name, role.Rules, inCluster)
		}
		for _, role := range manifest.All[rbacv1.Role](t, deployed, "Role") {
			wantHeld(t, role.Name, role.Rules, inNamespace)
		}
	}
}

// wantHeld says that each right of some rules is one of others.
func wantHeld(t *testing.T, role string, granted, held []rbacv1.PolicyRule) {
	t.Helper()
	for _, rule := range granted {
		names := rule.ResourceNames
		if len(names) == 0 {
			names = []string{""}
		}
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					for _, name := range names {
						if !slices.ContainsFunc(held, func(h rbacv1.PolicyRule) bool { return gives(h, group, resource, verb, name) }) {
							t.Errorf("%s gives %s %s.%s %s, which the operator does not have", role, verb, resource, group, name)
						}
					}
				}
			}
		}
	}
}

// gives says whether a rule gives a right to an object, or with an empty name to all.
func gives(rule rbacv1.PolicyRule, group, resource, verb, name string) bool {
	return slices.Contains(rule.APIGroups, group) && slices.Contains(rule.Resources, resource) && slices.Contains(rule.Verbs, verb) &&
		(len(rule.ResourceNames) == 0 || slices.Contains(rule.ResourceNames, name))
}

// The namespace has the claims of pools, and Kubernetes deletes their data with it: what is applied to install the operator, and deleted to
// remove it, does not have it.
func TestNamespaceOutlivesTheOperator(t *testing.T) {
	for _, directory := range []string{"", "/webhook", "/restores"} {
		for _, object := range manifest.Render(t, "../../../deploy/operator"+directory) {
			if object.Kind == "Namespace" {
				t.Errorf("deploy/operator%s has the namespace %s", directory, object.Name)
			}
		}
	}
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
