// Package olm makes what the Operator Lifecycle Manager installs the operator from: a ClusterServiceVersion, by itself or in a bundle. Rights,
// Deployment, definition, webhooks and example are those of deploy/operator.
package olm

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/webhook"
	program "kubevirt.io/hostpath-provisioner/pkg/version"
)

const (
	// Name is that of the package of bundles, and of the operator's Deployment.
	Name = "hostpath-provisioner-operator"
	// certificates is where OLM mounts the certificate that it makes for webhooks, port where the operator serves these, and so the Service
	// that OLM makes.
	certificates = "/tmp/k8s-webhook-server/serving-certs"
	port         = 9443
	// upstreamLabel is in the selector that the Deployment has from upstream's ClusterServiceVersion. A selector cannot change.
	upstreamLabel = "operator.hostpath-provisioner.kubevirt.io"
)

var (
	//go:embed csv.yaml
	base []byte
	//go:embed icon.svg
	icon []byte
)

// Options are what a ClusterServiceVersion is made for.
type Options struct {
	// Version is that of Semantic Versioning. Replaces is the name of the ClusterServiceVersion before, or empty.
	Version, Replaces string
	// Namespace is written into the objects, if it is not empty.
	Namespace string
	// Image is the operator's. PullPolicy may be empty.
	Image, PullPolicy string
	// Images are those of what it deploys, by variables of its environment. Others are of its release.
	Images map[string]string
	// Verbosity is the variable of that name, or empty.
	Verbosity string
	// Repository is where the source is, or empty for that of the program.
	Repository string
	// Icon is a PNG in Base64, or empty for the project's own.
	Icon string
}

// A clusterServiceVersion has of the kind what is known here. https://olm.operatorframework.io/docs/concepts/crds/clusterserviceversion
type clusterServiceVersion struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec map[string]any `json:"spec"`
}

func (o Options) clusterServiceVersion() (*clusterServiceVersion, error) {
	number, err := version.ParseSemantic(o.Version)
	if err != nil {
		return nil, fmt.Errorf("the version %q is not one such as 0.1.0: %w", o.Version, err)
	}
	images, err := o.images()
	if err != nil {
		return nil, err
	}
	var deployment appsv1.Deployment
	csv := &clusterServiceVersion{}
	webhooks, hookErr := webhookDefinitions()
	r, rightsErr := readRights()
	err = errors.Join(hookErr, rightsErr, yaml.Unmarshal(o.base(), csv), render.One(&deployment, "operator/deployment.yaml"), csv.annotate())
	if err != nil {
		return nil, err
	}
	o.adapt(&deployment, images)
	converted, err := render.Convert(&deployment)
	if err != nil {
		return nil, err
	}
	csv.Name, csv.Namespace = Name+".v"+number.String(), o.Namespace
	csv.Annotations["containerImage"] = o.Image
	// From each version before.
	csv.Annotations["olm.skipRange"] = "<" + number.String()
	csv.Spec["version"] = number.String()
	if o.Replaces != "" {
		csv.Spec["replaces"] = o.Replaces
	}
	csv.Spec["icon"] = []any{o.icon()}
	csv.Spec["webhookdefinitions"] = webhooks
	csv.Spec["install"] = map[string]any{"strategy": "deployment", "spec": map[string]any{
		"permissions":        []permissions{{Name, r.namespaced}},
		"clusterPermissions": []permissions{{Name, r.cluster}},
		"deployments":        []any{map[string]any{"name": Name, "label": deployment.Labels, "spec": converted.Object["spec"]}},
	}}
	related := []any{map[string]string{"name": Name, "image": o.Image}}
	for _, image := range images {
		related = append(related, map[string]string{"name": image.Name, "image": image.Image})
	}
	csv.Spec["relatedImages"] = related
	return csv, nil
}

// base is csv.yaml, for the repository of the options.
func (o Options) base() []byte {
	return bytes.ReplaceAll(base, []byte(program.DefaultRepository), []byte(cmp.Or(o.Repository, program.Repository())))
}

// images are those of what the operator deploys, as the operator itself would find them.
func (o Options) images() ([]render.Image, error) {
	config, err := render.ConfigFromEnvironment(func(variable string) string { return o.Images[variable] })
	if err != nil {
		return nil, err
	}
	if release, err := render.ReleaseOf(o.Image); err == nil {
		config.Release = release
	}
	manifests, err := render.Load()
	if err != nil {
		return nil, err
	}
	return manifests.Images(config)
}

// adapt changes in the Deployment what is different with OLM.
func (o Options) adapt(d *appsv1.Deployment, images []render.Image) {
	d.Spec.Selector.MatchLabels[upstreamLabel] = ""
	d.Spec.Template.Labels[upstreamLabel] = ""
	c := &d.Spec.Template.Spec.Containers[0]
	c.Image, c.ImagePullPolicy = o.Image, corev1.PullPolicy(o.PullPolicy)
	c.Args = append(c.Args, "--webhook-cert-dir="+certificates)
	for _, image := range images {
		c.Env = append(c.Env, corev1.EnvVar{Name: image.Variable, Value: image.Image})
	}
	if o.Verbosity != "" {
		c.Env = append(c.Env, corev1.EnvVar{Name: "VERBOSITY", Value: o.Verbosity})
	}
	// What HCO labels the pods with.
	for _, label := range []string{"part-of", "version"} {
		c.Env = append(c.Env, corev1.EnvVar{
			Name: "INSTALLER_" + strings.ToUpper(strings.ReplaceAll(label, "-", "_")) + "_LABEL",
			ValueFrom: &corev1.EnvVarSource{
				FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels['app.kubernetes.io/" + label + "']"},
			},
		})
	}
}

func (o Options) icon() map[string]string {
	if o.Icon != "" {
		return map[string]string{"base64data": o.Icon, "mediatype": "image/png"}
	}
	return map[string]string{"base64data": base64.StdEncoding.EncodeToString(icon), "mediatype": "image/svg+xml"}
}

// annotate adds the examples, and the namespace that the console of OpenShift makes.
func (csv *clusterServiceVersion) annotate() error {
	var example, move, namespace map[string]any
	if err := errors.Join(
		render.One(&example, "operator/example/plain.yaml"), render.One(&move, "operator/example/volumemove.yaml"),
		render.One(&namespace, "operator/namespace.yaml"),
	); err != nil {
		return err
	}
	for annotation, value := range map[string]any{"alm-examples": []any{example, move}, "operatorframework.io/suggested-namespace-template": namespace} {
		text, err := json.MarshalIndent(value, "", "  ")
		if err != nil {
			return err
		}
		csv.Annotations[annotation] = string(text)
	}
	return nil
}

type permissions struct {
	Account string              `json:"serviceAccountName"`
	Rules   []rbacv1.PolicyRule `json:"rules"`
}

// rights are those of deploy/operator/rbac.yaml: of the operator in the cluster and in its namespace, and a role for readers of its metrics.
type rights struct {
	cluster, namespaced []rbacv1.PolicyRule
	reader              rbacv1.ClusterRole
}

// readRights leaves out what the operator needs for a certificate of its own, which is in other files. What it may do in another
// namespace it may do in all: OLM has no rights in some.
func readRights() (r rights, err error) {
	const file = "operator/rbac.yaml"
	// A Role has the fields of a ClusterRole that matter here, and its binding those of the other.
	roles, err := render.Documents[rbacv1.ClusterRole](file)
	if err != nil {
		return r, err
	}
	bindings, err := render.Documents[rbacv1.ClusterRoleBinding](file)
	if err != nil {
		return r, err
	}
	bound := map[string]bool{}
	for _, binding := range bindings {
		bound[binding.RoleRef.Kind+" "+binding.RoleRef.Name] = true
	}
	for _, role := range roles {
		switch {
		case bound[role.Kind+" "+role.Name] && role.Kind == "Role" && role.Namespace == "":
			r.namespaced = append(r.namespaced, role.Rules...)
		case bound[role.Kind+" "+role.Name]:
			r.cluster = append(r.cluster, role.Rules...)
		case role.Kind == "ClusterRole":
			r.reader = role
		}
	}
	return r, nil
}

// webhookDefinitions are the webhooks as OLM configures them. It has no conditions: the operator is asked more often, and decides the same.
func webhookDefinitions() (all []map[string]any, err error) {
	for _, of := range []struct{ file, path string }{
		{"operator/webhook/validatingwebhookconfiguration.yaml", webhook.ValidatePath},
		{"operator/restores/mutatingwebhookconfiguration.yaml", webhook.RestoresPath},
	} {
		var configuration struct {
			Kind     string
			Webhooks []map[string]any
		}
		if err := render.One(&configuration, of.file); err != nil {
			return nil, err
		}
		for _, hook := range configuration.Webhooks {
			hook["generateName"], hook["type"] = hook["name"], strings.TrimSuffix(configuration.Kind, "WebhookConfiguration")+"AdmissionWebhook"
			hook["deploymentName"], hook["containerPort"], hook["targetPort"], hook["webhookPath"] = Name, port, port, "/"+of.path
			for _, key := range []string{"name", "clientConfig", "matchConditions"} {
				delete(hook, key)
			}
			all = append(all, hook)
		}
	}
	return all, nil
}
