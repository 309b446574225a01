package kubectl

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
)

const (
	// operatorName is that of the operator's Deployment, and of its container and program.
	operatorName = "hostpath-provisioner-operator"
	// olmOwner is the label of what the Operator Lifecycle Manager has made for a ClusterServiceVersion.
	olmOwner = "olm.owner"
)

// An Uninstallation removes the operator, with what it has deployed.
type Uninstallation struct {
	Kubectl Kubectl
	// Files are flags of kubectl, such as --filename=operator.yaml, for what was applied: no other object is removed by its name.
	Files []string
}

// Objects are what is there of the files, as kubectl names it. It returns an error if the operator is not among it, or was not installed from
// files: then something else would make it anew.
func (u Uninstallation) Objects(ctx context.Context) (names []string, err error) {
	out, err := u.Kubectl.run(ctx, u.arguments("get", "--ignore-not-found", "--output=name")...)
	if err != nil {
		return nil, fmt.Errorf("look for the objects of the files: %w", err)
	}
	names = strings.Fields(string(out))
	if !slices.Contains(names, "deployment.apps/"+operatorName) {
		return nil, fmt.Errorf("the files have no Deployment %s that is in the cluster: name those that you applied", operatorName)
	}
	out, err = u.Kubectl.run(ctx, "get", "deployment", operatorName, "--namespace="+u.Kubectl.Namespace, "--output=json")
	var deployment appsv1.Deployment
	if err == nil {
		err = json.Unmarshal(out, &deployment)
	}
	switch owner := deployment.Labels[olmOwner]; {
	case err != nil:
		return nil, fmt.Errorf("look for the operator: %w", err)
	case deployment.Labels["app.kubernetes.io/managed-by"] == "Helm":
		return nil, fmt.Errorf("the operator was installed by Helm: helm uninstall %s --namespace %s", deployment.Labels["app.kubernetes.io/instance"], u.Kubectl.Namespace)
	case owner != "":
		return nil, fmt.Errorf("the operator was installed by the Operator Lifecycle Manager: delete the HostPathProvisioner, and then the Subscription and the ClusterServiceVersion %s", owner)
	}
	return names, u.refuseClaims(ctx, names)
}

// refuseClaims refuses a Namespace that has claims, as those of pools: they would be deleted with it, and their data.
func (u Uninstallation) refuseClaims(ctx context.Context, names []string) error {
	for _, name := range names {
		namespace, is := strings.CutPrefix(name, "namespace/")
		if !is {
			continue
		}
		out, err := u.Kubectl.run(ctx, "get", "persistentvolumeclaims", "--namespace="+namespace, "--output=name")
		if err != nil {
			return fmt.Errorf("look for claims in the namespace %s: %w", namespace, err)
		}
		if claims := strings.Fields(string(out)); len(claims) > 0 {
			return fmt.Errorf("with the namespace %s, which is in the files, its claims and their data would be deleted: leave it out, or delete them first: %s",
				namespace, strings.Join(claims, ", "))
		}
	}
	return nil
}

// Run has the operator remove what only that can, and then removes the objects of the files. It shows what both say.
func (u Uninstallation) Run(ctx context.Context, out, errs io.Writer) error {
	err := u.Kubectl.show(ctx, out, errs, "exec", "--namespace="+u.Kubectl.Namespace, "deployment/"+operatorName, "--container="+operatorName, "--", "/"+operatorName, "uninstall")
	if err != nil {
		return fmt.Errorf("the operator is left as it is, and so are its files' objects: %w", err)
	}
	if err := u.Kubectl.show(ctx, out, errs, u.arguments("delete", "--ignore-not-found")...); err != nil {
		return fmt.Errorf("remove the objects of the files: %w", err)
	}
	return nil
}

func (u Uninstallation) arguments(command string, more ...string) []string {
	return slices.Concat([]string{command}, u.Files, more)
}

// show runs kubectl, and has the user see what it prints.
func (k Kubectl) show(ctx context.Context, out, errs io.Writer, arguments ...string) error {
	command := exec.CommandContext(ctx, k.Program, slices.Concat(k.Flags, arguments)...)
	command.Stdout, command.Stderr = out, errs
	command.WaitDelay = grace
	err := command.Run()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
