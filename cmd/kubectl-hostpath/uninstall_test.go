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

// Nothing is removed before the user has said so, and the operator not before it has ended what only it can.
func TestUninstall(t *testing.T) {
	const (
		files   = "--filename=operator.yaml --kustomize=classes"
		objects = "get " + files + " --ignore-not-found --output=name"
		found   = "get deployment hostpath-provisioner-operator --namespace=storage --output=json"
		claims  = "get persistentvolumeclaims --namespace=storage --output=name"
		asked   = "exec --namespace=storage deployment/hostpath-provisioner-operator --container=hostpath-provisioner-operator -- /hostpath-provisioner-operator uninstall"
		removed = "delete " + files + " --ignore-not-found"
	)
	for name, c := range map[string]struct {
		// labels are those of the operator's Deployment, and answer what the user types.
		labels, answer string
		without        string // an object that the files do not have
		claims         string // of the namespace, which the files have
		refuses, yes   bool
		want           []string
		problem        string
	}{
		"the user says yes":            {answer: "yes\n", want: []string{objects, found, claims, asked, removed}},
		"the user was not asked":       {yes: true, want: []string{objects, found, claims, asked, removed}},
		"the user says something":      {answer: "y\n", want: []string{objects, found, claims}, problem: "nothing was removed"},
		"no user is there":             {want: []string{objects, found, claims}, problem: "nothing was removed"},
		"the operator refuses":         {yes: true, refuses: true, want: []string{objects, found, claims, asked}, problem: "is left as it is"},
		"the namespace has claims":     {yes: true, claims: "persistentvolumeclaim/hpp-pool-fast-here", want: []string{objects, found, claims}, problem: "persistentvolumeclaim/hpp-pool-fast-here"},
		"files of something else":      {yes: true, without: "deployment.apps", want: []string{objects}, problem: "no Deployment hostpath-provisioner-operator"},
		"Helm has installed it":        {yes: true, labels: `"app.kubernetes.io/managed-by":"Helm","app.kubernetes.io/instance":"hpp"`, want: []string{objects, found}, problem: "helm uninstall hpp --namespace storage"},
		"a catalogue has the operator": {yes: true, labels: `"olm.owner":"operator.v1"`, want: []string{objects, found}, problem: "ClusterServiceVersion operator.v1"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			script := `#!/bin/sh
printf '%s\n' "$*" >>` + dir + `/asked
case $1-$2 in
get-deployment) echo '{"metadata":{"labels":{` + c.labels + `}}}' ;;
get-persistentvolumeclaims) echo $CLAIMS ;;
get-*) printf 'namespace/storage\ndeployment.apps/hostpath-provisioner-operator\n' | grep -v "^${WITHOUT:-nothing}" ;;
exec-*) exit ${REFUSES:-0} ;;
esac
`
			program := filepath.Join(dir, "kubectl")
			must.Succeed(t, os.WriteFile(program, []byte(script), 0o700))
			t.Setenv("WITHOUT", c.without)
			t.Setenv("CLAIMS", c.claims)
			if c.refuses {
				t.Setenv("REFUSES", "1")
			}
			r, err := parse([]string{"uninstall", "-f", "operator.yaml", "--kustomize", "classes"}, &strings.Builder{})
			must.Succeed(t, err)
			r.kubectl, r.yes = kubectl.Kubectl{Program: program, Namespace: "storage"}, c.yes
			var out, errs strings.Builder
			err = r.uninstall(t.Context(), strings.NewReader(c.answer), &out, &errs)
			if (err == nil) != (c.problem == "") || err != nil && !strings.Contains(err.Error(), c.problem) {
				t.Errorf("it ends with %v, want %q", err, c.problem)
			}
			asked, err := os.ReadFile(filepath.Join(dir, "asked"))
			must.Succeed(t, err)
			if diff := cmp.Diff(c.want, strings.Split(strings.TrimSpace(string(asked)), "\n")); diff != "" {
				t.Errorf("kubectl was asked (-want +got):\n%s", diff)
			}
			if shown := strings.Contains(out.String(), "\n  namespace/storage\n  deployment.apps/hostpath-provisioner-operator\n"); len(c.want) > 1 && c.labels == "" && shown == c.yes {
				t.Errorf("the user sees %q", out.String())
			}
		})
	}
}
