package kubectl

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
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

	definitionKind = "CustomResourceDefinition"
	admissionGroup = "admissionregistration.k8s.io"
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
	"":                          {"Service", "ServiceAccount"},
	admissionGroup:              {"MutatingWebhookConfiguration", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "ValidatingWebhookConfiguration"},
	"apps":                      {"Deployment"},
	"monitoring.coreos.com":     {"PodMonitor", "PrometheusRule", "ServiceMonitor"},
	"networking.k8s.io":         {"NetworkPolicy"},
	"rbac.authorization.k8s.io": {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"},
	"snapshot.storage.k8s.io":   {"VolumeSnapshotClass"},
	"storage.k8s.io":            {"StorageClass"},
}

func (o Object) removable() bool {
	group := o.group()
	// Objects of a definition go with it. The operator ends its own before.
	own := group == movev1.GroupVersion.Group || o.Kind == definitionKind && strings.HasSuffix(o.Name, "."+movev1.GroupVersion.Group)
	return own || slices.Contains(removable[group], o.Kind)
}

// Find returns an error if the operator is not among the objects of the files, or was not installed from files: then something else would make
// it anew.
func (u Uninstallation) Find(ctx context.Context) (c Contents, err error) {
	there, err := u.read(ctx)
	if err != nil {
		return c, err
	}
	var operator *Object
	for i, o := range there {
		if o.isOperator() {
			operator = &there[i]
		}
		if o.removable() {
			c.Removed = append(c.Removed, o)
		} else {
			c.Left = append(c.Left, o)
		}
	}
	return c, u.check(operator)
}

// read returns the objects of the files that are in the cluster. kubectl finds none of them if the cluster does not have the kind of one, as that
// of policies before Kubernetes 1.30, or what an interrupted uninstallation has removed.
func (u Uninstallation) read(ctx context.Context) ([]Object, error) {
	objects, err := u.named(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the files: %w", err)
	}
	there, err := u.Kubectl.kinds(ctx, objects)
	if err != nil {
		return nil, fmt.Errorf("ask which kinds the cluster has: %w", err)
	}
	objects = slices.DeleteFunc(objects, func(o Object) bool { return !there[o.GroupVersionKind()] })
	text, err := identities(objects)
	if err != nil || len(objects) == 0 {
		return nil, err
	}
	out, err := u.Kubectl.feed(ctx, bytes.NewReader(text), "get", "--filename=-", "--ignore-not-found", "--output=json")
	if err != nil {
		return nil, fmt.Errorf("look for the objects of the files: %w", err)
	}
	var found struct {
		Object
		Items []Object `json:"items"`
	}
	if len(bytes.TrimSpace(out)) > 0 {
		if err := json.Unmarshal(out, &found); err != nil {
			return nil, fmt.Errorf("read the objects of the files: %w", err)
		}
	}
	if found.Name != "" { // it is the only one
		return []Object{found.Object}, nil
	}
	return found.Items, nil
}

// named are the objects of the files. This command asks no API server.
func (u Uninstallation) named(ctx context.Context) (objects []Object, err error) {
	out, err := u.Kubectl.run(ctx, slices.Concat([]string{"label", "--local"}, u.Files, []string{"--overwrite", "--output=json", "hostpath-uninstall=reads"})...)
	if err != nil {
		return nil, err
	}
	for all := json.NewDecoder(bytes.NewReader(out)); ; {
		var one Object
		if err := all.Decode(&one); errors.Is(err, io.EOF) {
			return objects, nil
		} else if err != nil {
			return nil, err
		}
		objects = append(objects, one)
	}
}

// kinds are those of the objects that the cluster has.
func (k Kubectl) kinds(ctx context.Context, objects []Object) (map[schema.GroupVersionKind]bool, error) {
	var groups metav1.APIGroupList
	if err := k.raw(ctx, "/apis", &groups); err != nil {
		return nil, err
	}
	at := map[string]string{"v1": "/api/v1"}
	for _, group := range groups.Groups {
		for _, version := range group.Versions {
			at[version.GroupVersion] = "/apis/" + version.GroupVersion
		}
	}
	found := map[schema.GroupVersionKind]bool{}
	for _, object := range objects {
		path := at[object.APIVersion]
		if path == "" {
			continue
		}
		delete(at, object.APIVersion) // it is asked once
		var kinds metav1.APIResourceList
		if err := k.raw(ctx, path, &kinds); err != nil {
			return nil, err
		}
		for _, kind := range kinds.APIResources {
			found[schema.FromAPIVersionAndKind(object.APIVersion, kind.Kind)] = true
		}
	}
	return found, nil
}

// raw reads what the API server has at a path.
func (k Kubectl) raw(ctx context.Context, path string, to any) error {
	out, err := k.run(ctx, "get", "--raw="+path)
	if err == nil {
		err = json.Unmarshal(out, to)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
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

// Run has the operator remove what only that can, and then removes what was found and is still the same. It shows what both say.
func (u Uninstallation) Run(ctx context.Context, found Contents, out, errs io.Writer) error {
	err := u.Kubectl.show(ctx, nil, out, errs, "exec", "--namespace="+u.Kubectl.Namespace, "deployment/"+operatorName, "--container="+operatorName, "--", "/"+operatorName, "uninstall")
	if err != nil {
		return fmt.Errorf("the operator is left as it is, and so are its files' objects: %w", err)
	}
	there, err := u.read(ctx)
	if err != nil {
		return err
	}
	var admission, definitions, others []Object
	for _, o := range found.Removed {
		i := slices.IndexFunc(there, o.named)
		switch {
		case i < 0:
		case there[i].UID != o.UID && o.isOperator():
			return errors.New("the operator was made anew meanwhile, and is left as it is, and so are its files' objects: end what makes it, and try again")
		case there[i].UID != o.UID:
			fmt.Fprintf(errs, "Left, as it was made anew meanwhile: %s\n", o)
		case o.group() == admissionGroup:
			admission = append(admission, o)
		case o.Kind == definitionKind:
			definitions = append(definitions, o)
		default:
			others = append(others, o)
		}
	}
	// Objects of a definition go with it, and one that was made meanwhile needs the operator for that.
	if err := u.remove(ctx, slices.Concat(admission, definitions), out, errs); err != nil {
		return err
	}
	return u.remove(ctx, others, out, errs)
}

// named says whether another object has the kind and name of this one.
func (o Object) named(other Object) bool {
	return o.Name == other.Name && o.Namespace == other.Namespace && o.Kind == other.Kind && o.group() == other.group()
}

func (o Object) group() string { return schema.FromAPIVersionAndKind(o.APIVersion, o.Kind).Group }

func (o Object) isOperator() bool { return o.Kind == "Deployment" && o.Name == operatorName }

// remove returns when the objects are gone. It names them, not the files: these may have changed, and have what stays.
func (u Uninstallation) remove(ctx context.Context, objects []Object, out, errs io.Writer) error {
	if len(objects) == 0 {
		return nil
	}
	text, err := identities(objects)
	if err != nil {
		return err
	}
	if err := u.Kubectl.show(ctx, bytes.NewReader(text), out, errs, "delete", "--filename=-", "--ignore-not-found"); err != nil {
		return fmt.Errorf("remove the objects of the files: %w", err)
	}
	return nil
}

// identities are objects as kubectl takes them, with nothing but their kinds and names.
func identities(objects []Object) ([]byte, error) {
	items := make([]map[string]any, len(objects))
	for i, o := range objects {
		name := map[string]string{"name": o.Name}
		if o.Namespace != "" {
			name["namespace"] = o.Namespace
		}
		items[i] = map[string]any{"apiVersion": o.APIVersion, "kind": o.Kind, "metadata": name}
	}
	return json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
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
