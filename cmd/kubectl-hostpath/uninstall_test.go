package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/kubectl"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// known are the objects of the files whose kinds the cluster has, and discovery is what kubectl says of the files and of the kinds.
const known = `{"apiVersion":"v1","items":[{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"storage"}},` +
	`{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"hostpath-provisioner-operator","namespace":"storage"}}],"kind":"List"}`

var discovery = map[string]string{
	"files": `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"storage"}}
{"apiVersion":"admissionregistration.k8s.io/v1","kind":"ValidatingAdmissionPolicy","metadata":{"name":"node"}}
{"apiVersion":"hostpathprovisioner.kubevirt.io/v1beta1","kind":"HostPathProvisioner","metadata":{"name":"hpp"}}
{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"hostpath-provisioner-operator","namespace":"storage","labels":{"name":"operator"}},"spec":{}}`,
	".apis": `{"kind":"APIGroupList","groups":[{"name":"apps","versions":[{"groupVersion":"apps/v1","version":"v1"}]},` +
		`{"name":"admissionregistration.k8s.io","versions":[{"groupVersion":"admissionregistration.k8s.io/v1","version":"v1"}]}]}`,
	".api.v1":       `{"kind":"APIResourceList","groupVersion":"v1","resources":[{"name":"namespaces","kind":"Namespace"}]}`,
	".apis.apps.v1": `{"kind":"APIResourceList","groupVersion":"apps/v1","resources":[{"name":"deployments","kind":"Deployment"}]}`,
	".apis.admissionregistration.k8s.io.v1": `{"kind":"APIResourceList","groupVersion":"admissionregistration.k8s.io/v1",` +
		`"resources":[{"name":"validatingwebhookconfigurations","kind":"ValidatingWebhookConfiguration"}]}`,
}

// Nothing is removed before the user has said so, and the operator not before it has ended what only it can. Then only what was shown is, and
// nothing that may have data. The cluster may not have all kinds, as those of policies before Kubernetes 1.30: kubectl shows nothing of files with
// an object of such a kind.
func TestUninstall(t *testing.T) {
	const (
		objects  = "get --filename=- --ignore-not-found --output=json"
		asked    = "exec --namespace=storage deployment/hostpath-provisioner-operator --container=hostpath-provisioner-operator -- /hostpath-provisioner-operator uninstall"
		removed  = "delete --filename=- --ignore-not-found"
		operator = `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"hostpath-provisioner-operator","namespace":"storage","uid":"2","labels":{LABELS}},"spec":{}}`
		others   = `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"storage"}},` +
			`{"apiVersion":"v1","kind":"PersistentVolumeClaim","metadata":{"name":"data","namespace":"default"}},` +
			`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"volumesnapshots.snapshot.storage.k8s.io"}},` +
			`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"volumemoves.hostpathprovisioner.kubevirt.io","uid":"1"}},` +
			`{"apiVersion":"admissionregistration.k8s.io/v1","kind":"ValidatingAdmissionPolicy","metadata":{"name":"node"}}`
		policy     = `{"apiVersion":"admissionregistration.k8s.io/v1","kind":"ValidatingAdmissionPolicy","metadata":{"name":"node"}}`
		policyOnly = `{"apiVersion":"v1","items":[` + policy + `],"kind":"List"}`
		definition = `{"apiVersion":"v1","items":[` + policy + `,` +
			`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"volumemoves.hostpathprovisioner.kubevirt.io"}}],"kind":"List"}`
		deployment = `{"apiVersion":"v1","items":[` +
			`{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"hostpath-provisioner-operator","namespace":"storage"}}],"kind":"List"}`
	)
	all := []string{objects, asked, objects, removed, definition, removed, deployment}
	list := func(items ...string) string {
		return `{"apiVersion":"v1","kind":"List","items":[` + strings.Join(items, ",") + `]}`
	}
	for name, c := range map[string]struct {
		// found is what kubectl finds of the files, labels are those of the operator's Deployment, and answer what the user types.
		found, labels, answer string
		// anew is the uid of what has another one once the operator was asked.
		anew         string
		refuses, yes bool
		want         []string
		problem      string
	}{
		"the user says yes":            {answer: "yes\n", want: all},
		"the user was not asked":       {yes: true, want: all},
		"the user says something":      {answer: "y\n", want: []string{objects}, problem: "nothing was removed"},
		"no user is there":             {want: []string{objects}, problem: "nothing was removed"},
		"it was made anew meanwhile":   {answer: "yes\n", anew: "1", want: []string{objects, asked, objects, removed, policyOnly, removed, deployment}},
		"and so was the operator":      {answer: "yes\n", anew: "2", want: []string{objects, asked, objects}, problem: "was made anew"},
		"the operator refuses":         {yes: true, refuses: true, want: []string{objects, asked}, problem: "is left as it is"},
		"files of nothing":             {yes: true, found: " ", want: []string{objects}, problem: "no Deployment hostpath-provisioner-operator"},
		"files of something else":      {yes: true, found: list(others), want: []string{objects}, problem: "no Deployment hostpath-provisioner-operator"},
		"of another namespace":         {yes: true, found: strings.ReplaceAll(operator, `"storage"`, `"other"`), want: []string{objects}, problem: "in the namespace other"},
		"Helm has installed it":        {yes: true, labels: `"app.kubernetes.io/managed-by":"Helm","app.kubernetes.io/instance":"hpp"`, want: []string{objects}, problem: "helm uninstall hpp --namespace storage"},
		"a catalogue has the operator": {yes: true, labels: `"olm.owner":"operator.v1"`, want: []string{objects}, problem: "ClusterServiceVersion operator.v1"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			script := `#!/bin/sh
case "$*" in
"label --local --filename=operator.yaml --kustomize=classes "*) cat ` + dir + `/files; exit ;;
"get --raw="*) cat ` + dir + `/$(echo "${2#--raw=}" | tr / .); exit ;;
get*operator.yaml*) exit 1 ;;
esac
printf '%s\n' "$*" >>` + dir + `/asked
case $1 in
get) cat >` + dir + `/searched && cat ` + dir + `/found ;;
exec) sed -i "s/\"uid\":\"$ANEW\"/\"uid\":\"anew\"/" ` + dir + `/found; exit ${REFUSES:-0} ;;
delete) cat >>` + dir + `/asked && echo >>` + dir + `/asked ;;
esac
`
			for name, content := range discovery {
				must.Succeed(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
			}
			program := filepath.Join(dir, "kubectl")
			must.Succeed(t, os.WriteFile(program, []byte(script), 0o700))
			if c.found == "" {
				c.found = list(others, operator)
			}
			must.Succeed(t, os.WriteFile(filepath.Join(dir, "found"), []byte(strings.ReplaceAll(c.found, "LABELS", c.labels)), 0o600))
			if c.refuses {
				t.Setenv("REFUSES", "1")
			}
			t.Setenv("ANEW", c.anew)
			r, err := parse([]string{"uninstall", "-f", "operator.yaml", "--kustomize", "classes"}, &strings.Builder{})
			must.Succeed(t, err)
			r.kubectl, r.yes = kubectl.Kubectl{Program: program, Namespace: "storage"}, c.yes
			var out, errs strings.Builder
			err = r.uninstall(t.Context(), strings.NewReader(c.answer), &out, &errs)
			if (err == nil) != (c.problem == "") || err != nil && !strings.Contains(err.Error(), c.problem) {
				t.Errorf("it ends with %v, want %q", err, c.problem)
			}
			searched, err := os.ReadFile(filepath.Join(dir, "searched"))
			must.Succeed(t, err)
			if diff := cmp.Diff(known, string(searched)); diff != "" {
				t.Errorf("kubectl was to find (-want +got):\n%s", diff)
			}
			asked, err := os.ReadFile(filepath.Join(dir, "asked"))
			must.Succeed(t, err)
			if diff := cmp.Diff(c.want, strings.Split(strings.TrimSpace(string(asked)), "\n")); diff != "" {
				t.Errorf("kubectl was asked (-want +got):\n%s", diff)
			}
			const shown = "\n  CustomResourceDefinition volumemoves.hostpathprovisioner.kubevirt.io\n  ValidatingAdmissionPolicy node\n  Deployment storage/hostpath-provisioner-operator\n"
			if is := strings.Contains(out.String(), shown); !c.yes && !is {
				t.Errorf("the user sees %q", out.String())
			}
			const left = "Namespace storage, PersistentVolumeClaim default/data, CustomResourceDefinition volumesnapshots.snapshot.storage.k8s.io"
			if is := strings.Contains(out.String(), left); len(c.want) > 4 && !is {
				t.Errorf("what stays is not said: %q", out.String())
			}
		})
	}
}
