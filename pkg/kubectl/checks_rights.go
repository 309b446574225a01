package kubectl

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A right is one of a ServiceAccount.
type right struct {
	// account is NAMESPACE:NAME.
	account, verb, resource string
	// more are flags of kubectl auth can-i.
	more []string
	// without is what happens without it, and mend what to do.
	without, mend string
}

// wantedRights are some of each sidecar's, and the one of the snapshot-controller that its manifests have commented out.
func wantedRights(driver driverPods, deployments []appsv1.Deployment) (all []right) {
	const mend = "Apply the manifests again: they have the roles of the driver"
	account := driver.pods[0].Namespace + ":" + driver.pods[0].Spec.ServiceAccountName
	all = []right{
		{account, "create", "persistentvolumes", nil, "no volume is made", mend},
		{account, "create", "csistoragecapacities.storage.k8s.io", []string{"--namespace=" + driver.namespace}, "the scheduler does not know which node has room", mend},
		{account, "patch", "persistentvolumeclaims", []string{"--subresource=status"}, "no volume grows", mend},
	}
	if !driver.makesSnapshots() {
		return all
	}
	all = append(all, right{account, "patch", "volumesnapshotcontents.snapshot.storage.k8s.io", []string{"--subresource=status"}, "no snapshot is made", mend})
	if d, _ := findSnapshotController(deployments); d != nil && d.Spec.Template.Spec.ServiceAccountName != "" {
		all = append(all, right{d.Namespace + ":" + d.Spec.Template.Spec.ServiceAccountName, "list", "nodes", nil, "no node makes a snapshot",
			"Give it get, list and watch of nodes: its manifests have that commented out (docs/snapshots.md#install)"})
	}
	return all
}

// askRights returns those of the wanted rights that are not there.
func askRights(ctx context.Context, k Kubectl, wanted []right) (refused []right, err error) {
	answers, errs := make([]bool, len(wanted)), make([]error, len(wanted))
	var asked sync.WaitGroup
	for i, r := range wanted {
		asked.Go(func() { answers[i], errs[i] = r.given(ctx, k) })
	}
	asked.Wait()
	for i, r := range wanted {
		if !answers[i] {
			refused = append(refused, r)
		}
	}
	return refused, errors.Join(errs...)
}

// given asks kubectl, whose exit status is 1 for an answer that is no.
func (r right) given(ctx context.Context, k Kubectl) (bool, error) {
	out, err := k.run(ctx, append([]string{"auth", "can-i", r.verb, r.resource, "--as=system:serviceaccount:" + r.account}, r.more...)...)
	var status *exec.ExitError
	switch answer, _, _ := strings.Cut(strings.TrimSpace(string(out)), " "); {
	case err == nil && answer == "yes":
		return true, nil
	case errors.As(err, &status) && answer == "no":
		return false, nil
	case err == nil:
		err = fmt.Errorf("the answer is %q", printable(string(out)))
	}
	return false, fmt.Errorf("ask for the rights of %s: %w", r.account, err)
}

// RightChecks are whether accounts have the rights that they need, and no more.
type rightChecks struct {
	// refused are rights that an account lacks.
	refused  []right
	nodes    []corev1.Node
	bindings []metav1.PartialObjectMetadata
}

func (c rightChecks) rights() (string, []Finding) {
	var problems []Finding
	for _, r := range c.refused {
		problems = append(problems, Finding{Problem: fmt.Sprintf("%s may not %s %s, so that %s", r.account, r.verb, r.resource, r.without), Mend: r.mend})
	}
	return "the accounts have theirs", problems
}

// policies are the bindings by which the token of a node reaches what is of that node only, of deploy/csi and of the operator.
var policies = []string{"hostpath-csi-node", "hostpath-provisioner-operator-node"}

func hasPolicies(nodes []corev1.Node) bool {
	return !slices.ContainsFunc(nodes, func(n corev1.Node) bool { return older(n.Status.NodeInfo.KubeletVersion, firstPolicies) })
}

func (c rightChecks) policy() (string, []Finding) {
	if !hasPolicies(c.nodes) {
		return fmt.Sprintf("Kubernetes before %s knows none: root on a node has the rights of the driver everywhere", firstPolicies), nil
	}
	if !slices.ContainsFunc(c.bindings, func(b metav1.PartialObjectMetadata) bool { return slices.Contains(policies, b.Name) }) {
		return "", []Finding{{
			Problem: "root on a node has the rights of the driver everywhere, as no policy holds them to the node",
			Mend:    "Apply deploy/csi/base/node-policy.yaml, or with the operator deploy/operator/node-policy.yaml: docs/security.md#rights-of-a-node",
		}}
	}
	return "the rights of a node end at what is of that node", nil
}
