package deploy_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

// Each account that has a token on every node, and may change PersistentVolumes, is held to the node.
func TestNodePolicies(t *testing.T) {
	for dir, accounts := range map[string][]string{
		csiDir:                     {"hostpath-csi-driver"},
		"../../deploy/devices":     {"local-pv-provisioner"},
		"../../deploy/provisioner": {"kubevirt-hostpath-provisioner"},
		"../../deploy/operator":    {"hostpath-provisioner-admin-csi", "hostpath-provisioner-admin"},
	} {
		objects := manifest.Render(t, dir)
		policies := manifest.All[admissionv1.ValidatingAdmissionPolicy](t, objects, "ValidatingAdmissionPolicy")
		bindings := manifest.All[admissionv1.ValidatingAdmissionPolicyBinding](t, objects, "ValidatingAdmissionPolicyBinding")
		if len(policies) != len(accounts) || len(bindings) != len(accounts) {
			t.Fatalf("%s has %d policies and %d bindings, want %d", dir, len(policies), len(bindings), len(accounts))
		}
		for i, p := range policies {
			// In whatever namespace a kustomization of the user's puts it.
			want := "request.userInfo.username.startsWith('system:serviceaccount:') && request.userInfo.username.endsWith(':" + accounts[i] + "')"
			if diff := cmp.Diff(want, p.Spec.MatchConditions[0].Expression); *p.Spec.FailurePolicy != admissionv1.Fail || diff != "" {
				t.Errorf("%s: the policy %s: %s", dir, p.Name, diff)
			}
			if b := bindings[i].Spec; b.PolicyName != p.Name || !slices.Equal(b.ValidationActions, []admissionv1.ValidationAction{admissionv1.Deny}) {
				t.Errorf("%s: the binding of %s is %+v", dir, p.Name, b)
			}
		}
		for _, set := range manifest.All[appsv1.DaemonSet](t, objects, "DaemonSet") {
			if account := set.Spec.Template.Spec.ServiceAccountName; account != accounts[0] {
				t.Errorf("%s: the pods have the account %s", dir, account)
			}
		}
	}
}

// What the operator's policies demand is what those of the manifests do.
func TestNodePoliciesOfOperator_areThoseOfTheManifests(t *testing.T) {
	of := func(dir, name string) (variables map[string]string, validations []string) {
		p := manifest.Named[admissionv1.ValidatingAdmissionPolicy](t, manifest.Render(t, dir), "ValidatingAdmissionPolicy", name)
		variables = map[string]string{}
		for _, v := range p.Spec.Variables {
			variables[v.Name] = v.Expression
		}
		delete(variables, "sharedPools")
		for _, v := range p.Spec.Validations {
			validations = append(validations, v.Expression)
		}
		return variables, validations
	}
	for name, from := range map[string][2]string{
		"hostpath-provisioner-operator-node":        {csiDir, "hostpath-csi-node"},
		"hostpath-provisioner-operator-legacy-node": {"../../deploy/provisioner", "kubevirt-hostpath-provisioner-node"},
	} {
		variables, validations := of("../../deploy/operator", name)
		wantVariables, want := of(from[0], from[1])
		if diff := cmp.Diff(wantVariables, variables) + cmp.Diff(want, validations); diff != "" {
			t.Errorf("%s (- want, + got):\n%s", name, diff)
		}
	}
}

// The API server looks for the parameter of a policy before it asks for the account: a missing one must not refuse what others do. It refuses that
// as long as the kind is missing, as of a definition that was removed, which is one that each cluster has.
func TestNodePolicyOfOperator_withoutParameterRefusesNothing(t *testing.T) {
	const name = "hostpath-provisioner-operator-node"
	objects := manifest.Render(t, "../../deploy/operator")
	b := manifest.Named[admissionv1.ValidatingAdmissionPolicyBinding](t, objects, "ValidatingAdmissionPolicyBinding", name)
	if b.Spec.ParamRef == nil || *b.Spec.ParamRef.ParameterNotFoundAction != admissionv1.AllowAction {
		t.Errorf("the parameter is %+v", b.Spec.ParamRef)
	}
	p := manifest.Named[admissionv1.ValidatingAdmissionPolicy](t, objects, "ValidatingAdmissionPolicy", name)
	if kind := p.Spec.ParamKind; !strings.HasPrefix(kind.APIVersion, "storage.k8s.io/") {
		t.Errorf("the kind of the parameter is %s %s", kind.APIVersion, kind.Kind)
	}
}

// A Secret that a volume names can be read by the kubelet of each node where a pod uses its claim.
func TestNodePolicyRefusesVolumesThatNameSecrets(t *testing.T) {
	p := manifest.Named[admissionv1.ValidatingAdmissionPolicy](t, manifest.Render(t, csiDir), "ValidatingAdmissionPolicy", "hostpath-csi-node")
	source := reflect.TypeFor[corev1.CSIPersistentVolumeSource]()
	for i := range source.NumField() {
		if source.Field(i).Type != reflect.TypeFor[*corev1.SecretReference]() {
			continue
		}
		name, _, _ := strings.Cut(source.Field(i).Tag.Get("json"), ",")
		if !slices.ContainsFunc(p.Spec.Validations, func(v admissionv1.Validation) bool {
			return strings.Contains(v.Expression, "has(object.spec.csi."+name+")")
		}) {
			t.Errorf("a volume may have %s", name)
		}
	}
}

// Growth of another node's volume changes its capacity, in which the API server takes no key but storage
// (ValidatePersistentVolumeSpec of k8s.io/kubernetes). What it lets no client change needs no comparison: of the sources
// only csi has a field that can be set later, controllerExpandSecretRef, after which csi-resizer never grows the volume again.
func TestNodePolicyLetsGrowthChangeNothingElse(t *testing.T) {
	p := manifest.Named[admissionv1.ValidatingAdmissionPolicy](t, manifest.Render(t, csiDir), "ValidatingAdmissionPolicy", "hostpath-csi-node")
	at := slices.IndexFunc(p.Spec.Variables, func(v admissionv1.Variable) bool { return v.Name == "resizes" })
	compared := p.Spec.Variables[at].Expression
	// A growth that failed may be given up (RecoverVolumeExpansionFailure): csi-resizer writes a smaller size then.
	if strings.Contains(compared, "spec.capacity") {
		t.Error("the capacity may not be changed to any other")
	}
	names := []string{"csi"}
	for _, field := range reflect.VisibleFields(reflect.TypeFor[corev1.PersistentVolumeSpec]()) {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if len(field.Index) == 1 && name != "" && name != "capacity" && name != "volumeMode" {
			names = append(names, name)
		}
	}
	for _, name := range names {
		if !strings.Contains(compared, "object.spec.?"+name+" == oldObject.spec.?"+name+" ") {
			t.Errorf("%s may be changed", name)
		}
	}
}

// A restore takes the snapshot that the handle of a VolumeSnapshotContent names, wherever it is found. That of another user is not given to one of
// the node's own: csi-snapshotter ends the name with the uid of the VolumeSnapshot, and the driver adds its node.
func TestNodePolicyHoldsHandlesOfSnapshots(t *testing.T) {
	p := manifest.Named[admissionv1.ValidatingAdmissionPolicy](t, manifest.Render(t, csiDir), "ValidatingAdmissionPolicy", "hostpath-csi-node")
	at := slices.IndexFunc(p.Spec.Validations, func(v admissionv1.Validation) bool { return strings.Contains(v.Expression, "snapshotHandle") })
	if at < 0 {
		t.Fatal("a snapshot may be given any handle")
	}
	for _, want := range []string{
		"object.spec == oldObject.spec",
		"object.status.snapshotHandle.endsWith('-' + object.spec.volumeSnapshotRef.?uid.orValue('?') + '@' + variables.node) &&",
		"object.status.snapshotHandle.split('@').size() == 2",
	} {
		if got := p.Spec.Validations[at].Expression; !strings.Contains(got, want) {
			t.Errorf("%s is not asked for in %s", want, got)
		}
	}
}

// As docs/configuration.md and docs/security.md say.
func TestNodePolicyIsChangedByKustomizationsOfUsers(t *testing.T) {
	objects := overlay(t, map[string]string{"kustomization.yaml": `
resources: [$csi]
patches:
- target: {kind: ValidatingAdmissionPolicy, name: hostpath-csi-node}
  patch: |
    - op: test
      path: /spec/variables/1/name
      value: sharedPools
    - op: replace
      path: /spec/variables/1/expression
      value: "['nfs']"
`})
	if got := manifest.Only[admissionv1.ValidatingAdmissionPolicy](t, objects, "ValidatingAdmissionPolicy").Spec.Variables[1].Expression; got != "['nfs']" {
		t.Errorf("the shared pools are %s", got)
	}
	for _, o := range overlay(t, map[string]string{"kustomization.yaml": `
resources: [$csi]
patches:
- target: {kind: ValidatingAdmissionPolicy|ValidatingAdmissionPolicyBinding}
  path: remove.yaml
`, "remove.yaml": `{"$patch": "delete", "kind": "any", "metadata": {"name": "any"}}`}) {
		if strings.HasPrefix(o.Kind, "ValidatingAdmissionPolicy") {
			t.Errorf("%s is left", o)
		}
	}
}
