package kubectl

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	movev1 "kubevirt.io/hostpath-provisioner/api/v1alpha1"
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

// An Object is one of the files that is in the cluster.
type Object struct{ metav1.PartialObjectMetadata }

// String is its kind and name.
func (o Object) String() string {
	return o.Kind + " " + strings.TrimPrefix(o.Namespace+"/"+o.Name, "/")
}

// Contents are what is in the cluster of the files.
type Contents struct {
	// Removed may be removed with the operator. Left may have data, or take data along, as a Namespace its claims, or is not known.
	Removed, Left []Object
}

// removable are the kinds of which no object has data, by their groups.
var removable = map[string][]string{
	"":                             {"Service", "ServiceAccount"},
	"admissionregistration.k8s.io": {"MutatingWebhookConfiguration", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "ValidatingWebhookConfiguration"},
	"apps":                         {"Deployment"},
	"monitoring.coreos.com":        {"PodMonitor", "PrometheusRule", "ServiceMonitor"},
	"networking.k8s.io":            {"NetworkPolicy"},
	"rbac.authorization.k8s.io":    {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"},
	"snapshot.storage.k8s.io":      {"VolumeSnapshotClass"},
	"storage.k8s.io":               {"StorageClass"},
}

func (o Object) removable() bool {
	group := schema.FromAPIVersionAndKind(o.APIVersion, o.Kind).Group
	// Objects of a definition go with it. The operator ends its own before.
	own := group == movev1.GroupVersion.Group || o.Kind == "CustomResourceDefinition" && strings.HasSuffix(o.Name, "."+movev1.GroupVersion.Group)
	return own || slices.Contains(removable[group], o.Kind)
}

// Find returns an error if the operator is not among the objects of the files, or was not installed from files: then something else would make
// it anew.
func (u Uninstallation) Find(ctx context.Context) (c Contents, err error) {
	out, err := u.Kubectl.run(ctx, slices.Concat([]string{"get"}, u.Files, []string{"--ignore-not-found", "--output=json"})...)
	if err != nil {
		return c, fmt.Errorf("look for the objects of the files: %w", err)
	}
	var found struct {
		Object
		Items []Object `json:"items"`
	}
	if len(bytes.TrimSpace(out)) > 0 {
		if err := json.Unmarshal(out, &found); err != nil {
			return c, fmt.Errorf("read the objects of the files: %w", err)
		}
	}
	if found.Name != "" { // it is the only one
		found.Items = []Object{found.Object}
	}
	var operator *Object
	for i, o := range found.Items {
		if o.Kind == "Deployment" && o.Name == operatorName {
			operator = &found.Items[i]
		}
		if o.removable() {
			c.Removed = append(c.Removed, o)
		} else {
			c.Left = append(c.Left, o)
		}
	}
	return c, u.check(operator)
}

// check refuses an operator that is not there, is another one, or was not installed from files.
func (u Uninstallation) check(operator *Object) error {
	if operator == nil {
		return fmt.Errorf("the files have no Deployment %s that is in the cluster: name those that you applied", operatorName)
	}
	switch owner := operator.Labels[olmOwner]; {
	case operator.Namespace != u.Kubectl.Namespace:
		return fmt.Errorf("the operator of the files is in the namespace %s: if it is meant, say so with --namespace", operator.Namespace)
	case operator.Labels["app.kubernetes.io/managed-by"] == "Helm":
		return fmt.Errorf("the operator was installed by Helm: helm uninstall %s --namespace %s", operator.Labels["app.kubernetes.io/instance"], operator.Namespace)
	case owner != "":
		return fmt.Errorf("the operator was installed by the Operator Lifecycle Manager: delete the HostPathProvisioner, and then the Subscription and the ClusterServiceVersion %s", owner)
	}
	return nil
}

// Run has the operator remove what only that can, and then removes what was found. It shows what both say.
func (u Uninstallation) Run(ctx context.Context, found Contents, out, errs io.Writer) error {
	err := u.Kubectl.show(ctx, nil, out, errs, "exec", "--namespace="+u.Kubectl.Namespace, "deployment/"+operatorName, "--container="+operatorName, "--", "/"+operatorName, "uninstall")
	if err != nil {
		return fmt.Errorf("the operator is left as it is, and so are its files' objects: %w", err)
	}
	items := make([]map[string]any, len(found.Removed))
	for i, o := range found.Removed {
		name := map[string]string{"name": o.Name}
		if o.Namespace != "" {
			name["namespace"] = o.Namespace
		}
		items[i] = map[string]any{"apiVersion": o.APIVersion, "kind": o.Kind, "metadata": name}
	}
	// Not the files: they may have changed, and have what stays.
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
	if err != nil {
		return err
	}
	if err := u.Kubectl.show(ctx, bytes.NewReader(text), out, errs, "delete", "--filename=-", "--ignore-not-found"); err != nil {
		return fmt.Errorf("remove the objects of the files: %w", err)
	}
	return nil
}

// show runs kubectl, and has the user see what it prints.
func (k Kubectl) show(ctx context.Context, in io.Reader, out, errs io.Writer, arguments ...string) error {
	command := exec.CommandContext(ctx, k.Program, slices.Concat(k.Flags, arguments)...)
	command.Stdin, command.Stdout, command.Stderr = in, out, errs
	command.WaitDelay = grace
	err := command.Run()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
