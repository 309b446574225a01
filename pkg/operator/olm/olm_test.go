package olm

import (
	"bytes"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/version"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A made is a ClusterServiceVersion with what the tests read of it.
type made struct {
	Metadata struct {
		Name, Namespace string
		Annotations     map[string]string
	}
	Spec struct {
		Version, Replaces string
		Icon              []struct{ Base64data, Mediatype string }
		RelatedImages     []struct{ Name, Image string }
		Install           struct {
			Spec struct {
				Permissions, ClusterPermissions []permissions
				Deployments                     []struct {
					Name string
					Spec appsv1.DeploymentSpec
				}
			}
		}
		Webhookdefinitions []map[string]any
	}
}

// generated are the ClusterServiceVersion that csv-generator prints for some flags, and what follows it.
func generated(t *testing.T, arguments ...string) (csv made, others []string) {
	t.Helper()
	var out bytes.Buffer
	must.Succeed(t, Generate(arguments, &out))
	all := strings.Split(out.String(), "---\n")[1:]
	must.Succeed(t, yaml.Unmarshal([]byte(all[0]), &csv))
	return csv, all[1:]
}

func (m made) container(t *testing.T) corev1.Container {
	t.Helper()
	deployments := m.Spec.Install.Spec.Deployments
	if len(deployments) != 1 || deployments[0].Name != Name {
		t.Fatalf("the deployments are %+v", deployments)
	}
	return deployments[0].Spec.Template.Spec.Containers[0]
}

// HCO names each image that upstream's operator has by its digest, and no other.
func TestGeneratorTakesTheFlagsOfHCO(t *testing.T) {
	const digest = "@sha256:0000000000000000000000000000000000000000000000000000000000000000"
	csv, others := generated(t,
		"--csv-version=1.19.0", "--operator-image-name=ghcr.io/kubevirt/hostpath-provisioner/hostpath-provisioner-operator"+digest,
		"--provisioner-image-name=ghcr.io/kubevirt/hostpath-provisioner/hostpath-provisioner"+digest, "--csi-driver-image-name=ghcr.io/kubevirt/hostpath-provisioner/hostpath-csi-driver"+digest,
		"--csi-node-driver-image-name=k8s/registrar"+digest, "--csi-liveness-probe-image-name=k8s/livenessprobe"+digest,
		"--csi-external-provisioner-image-name=k8s/provisioner"+digest, "--csi-snapshotter-image-name=k8s/snapshotter"+digest,
		"--namespace=kubevirt-hyperconverged", "--pull-policy=IfNotPresent", "--dump-crds")
	if csv.Metadata.Namespace != "kubevirt-hyperconverged" || csv.Spec.Version != "1.19.0" {
		t.Errorf("it is %s in %s, of version %s", csv.Metadata.Name, csv.Metadata.Namespace, csv.Spec.Version)
	}
	if len(others) != 2 || !strings.Contains(others[0], "\nkind: CustomResourceDefinition\n") || !strings.Contains(others[1], "\nkind: CustomResourceDefinition\n") {
		t.Errorf("it is followed by %.200q", others)
	}
	c := csv.container(t)
	if c.ImagePullPolicy != corev1.PullIfNotPresent || !slices.Contains(c.Args, "--webhook-cert-dir=/tmp/k8s-webhook-server/serving-certs") {
		t.Errorf("the container is pulled %s, and has the arguments %q", c.ImagePullPolicy, c.Args)
	}
	images := map[string]string{}
	for _, related := range csv.Spec.RelatedImages {
		images[related.Name] = related.Image
	}
	for name, want := range map[string]string{
		"hostpath-provisioner-operator": c.Image, "hostpath-csi-driver": "ghcr.io/kubevirt/hostpath-provisioner/hostpath-csi-driver" + digest,
		"csi-node-driver-registrar": "k8s/registrar" + digest, "csi-snapshotter": "k8s/snapshotter" + digest,
	} {
		if images[name] != want {
			t.Errorf("the image %s is %s, want %s", name, images[name], want)
		}
	}
	for _, name := range []string{"pool-mounter", "csi-resizer", "csi-external-health-monitor-controller"} {
		if !strings.Contains(images[name], "/"+name+":v") {
			t.Errorf("the image %s is %s", name, images[name])
		}
	}
}

// The operator finds by its environment what the ClusterServiceVersion names, and there is a flag for each image.
func TestAllImagesAreInTheEnvironment(t *testing.T) {
	arguments := []string{"--csv-version=1.0.0", "--operator-image-name=example.com/hpp/hostpath-provisioner-operator:v9", "--verbosity=3"}
	csv, _ := generated(t, arguments...)
	environment := map[string]string{}
	for _, variable := range csv.container(t).Env {
		if variable.Value != "" {
			environment[variable.Name] = variable.Value
		}
	}
	config, err := render.ConfigFromEnvironment(func(name string) string { return environment[name] })
	must.Succeed(t, err)
	manifests, err := render.Load()
	must.Succeed(t, err)
	images, err := manifests.Images(config)
	must.Succeed(t, err)
	if config.Verbosity != 3 || len(images) != len(imageFlags) || len(images)+1 != len(csv.Spec.RelatedImages) {
		t.Errorf("the verbosity is %d; %d images, %d flags, %d related images", config.Verbosity, len(images), len(imageFlags), len(csv.Spec.RelatedImages))
	}
	for i, image := range images {
		if config.Images[imageNamed(t, config, image)] == "" || csv.Spec.RelatedImages[i+1].Image != image.Image {
			t.Errorf("%+v is %+v", image, csv.Spec.RelatedImages[i+1])
		}
	}
	if got := environment["MOUNTER_IMAGE"]; got != "example.com/hpp/pool-mounter:v9" {
		t.Errorf("the mounter is %s, which is not of the operator's release", got)
	}
	for _, variable := range imageFlags {
		if environment[variable] == "" {
			t.Errorf("the environment has no %s", variable)
		}
	}
}

// imageNamed is the name in the manifests by which a configuration has an image.
func imageNamed(t *testing.T, config render.Config, image render.Image) string {
	t.Helper()
	for name, value := range config.Images {
		if value == image.Image && strings.HasSuffix(name, "/"+image.Name) {
			return name
		}
	}
	t.Errorf("the environment does not name %+v", image)
	return ""
}

// What OLM grants is what the manifests grant, but for the certificate that OLM makes.
func TestRightsAreThoseOfTheManifests(t *testing.T) {
	csv, _ := generated(t, "--csv-version=1.0.0")
	spec := csv.Spec.Install.Spec
	roles, err := render.Documents[rbacv1.ClusterRole]("operator/rbac.yaml")
	must.Succeed(t, err)
	var cluster, namespaced []rbacv1.PolicyRule
	for _, role := range roles {
		switch role.Kind + " " + role.Name {
		case "ClusterRole hostpath-provisioner-operator", "Role hostpath-provisioner-operator-events":
			cluster = append(cluster, role.Rules...)
		case "Role hostpath-provisioner-operator":
			namespaced = role.Rules
		}
	}
	if diff := cmp.Diff([]permissions{{Name, cluster}}, spec.ClusterPermissions); diff != "" {
		t.Errorf("in the cluster: %s", diff)
	}
	if diff := cmp.Diff([]permissions{{Name, namespaced}}, spec.Permissions); diff != "" {
		t.Errorf("in the namespace: %s", diff)
	}
	// In its own namespace those of the movers of VolumeMoves.
	for _, rule := range cluster {
		if slices.Contains(rule.Resources, "secrets") {
			t.Errorf("%v is a right to secrets", rule)
		}
	}
	deployment := spec.Deployments[0].Spec
	for _, key := range []string{"name", upstreamLabel} {
		if value, ok := deployment.Selector.MatchLabels[key]; !ok || deployment.Template.Labels[key] != value {
			t.Errorf("the Deployment of upstream's has %s in its selector, which is %v", key, deployment.Selector.MatchLabels)
		}
	}
}

func TestWebhooksAreThoseOfTheManifests(t *testing.T) {
	csv, _ := generated(t, "--csv-version=1.0.0")
	paths := map[string]string{}
	for _, hook := range csv.Spec.Webhookdefinitions {
		kind, _ := hook["type"].(string)
		paths[kind], _ = hook["webhookPath"].(string)
		for _, key := range []string{"generateName", "rules", "failurePolicy", "sideEffects", "admissionReviewVersions", "timeoutSeconds", "deploymentName"} {
			if hook[key] == nil {
				t.Errorf("%v has no %s", hook, key)
			}
		}
		for _, of := range csv.container(t).Ports {
			if port, _ := hook["containerPort"].(float64); of.Name == "webhook" && of.ContainerPort != int32(port) {
				t.Errorf("%v leads to another port than %d", hook, of.ContainerPort)
			}
		}
	}
	if want := map[string]string{"ValidatingAdmissionWebhook": "/validate", "MutatingAdmissionWebhook": "/restores"}; !maps.Equal(paths, want) {
		t.Errorf("the paths are %v, want %v", paths, want)
	}
}

func TestGeneratorRefusesUnknownFlags(t *testing.T) {
	for _, arguments := range [][]string{{"--csv-version=1.0"}, {}, {"--csv-version=1.0.0", "more"}, {"--csv-version=1.0.0", "--no-such-flag"}} {
		var out bytes.Buffer
		if err := Generate(arguments, &out); err == nil || out.Len() > 0 {
			t.Errorf("%q: %v, and %d bytes", arguments, err, out.Len())
		}
	}
}

// The same options give the same bytes, and those of another icon, of network policies and of an earlier version are there.
func TestOptionsOfTheGenerator(t *testing.T) {
	arguments := []string{
		"--csv-version=v2.0.0-rc.1", "--replaces-csv-version=hostpath-provisioner-operator.v1.0.0", "--logo-base64=AAAA", "--namespace=storage",
		"--dump-network-policies",
	}
	csv, policies := generated(t, arguments...)
	if csv.Metadata.Name != Name+".v2.0.0-rc.1" || csv.Spec.Replaces != Name+".v1.0.0" || csv.Metadata.Annotations["olm.skipRange"] != "<2.0.0-rc.1" {
		t.Errorf("%+v replaces %s", csv.Metadata, csv.Spec.Replaces)
	}
	if icon := csv.Spec.Icon[0]; icon.Base64data != "AAAA" || icon.Mediatype != "image/png" {
		t.Errorf("the icon is %+v", icon)
	}
	if len(policies) != 4 {
		t.Errorf("%d network policies", len(policies))
	}
	for _, policy := range policies {
		if !strings.Contains(policy, "\nkind: NetworkPolicy\n") || !strings.Contains(policy, "\n  namespace: storage\n") {
			t.Errorf("%s", policy)
		}
	}
	var first, second bytes.Buffer
	must.Succeed(t, Generate(arguments, &first))
	must.Succeed(t, Generate(arguments, &second))
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the second time it was different")
	}
}

func TestBundleNamesItsRepository(t *testing.T) {
	const other = "https://git.example.com/storage/hostpath"
	options := Options{Version: "0.2.0", Image: "example.com/hpp/" + Name + ":v0.2.0", Repository: other}
	files, err := options.Bundle()
	must.Succeed(t, err)
	for name, content := range files {
		if bytes.Contains(content, []byte(version.DefaultRepository)) {
			t.Errorf("%s names %s", name, version.DefaultRepository)
		}
	}
	csv := string(files["manifests/"+Name+".clusterserviceversion.yaml"])
	if !strings.Contains(csv, "    repository: "+other+"\n") || !strings.Contains(csv, "    url: "+other+"\n") {
		t.Errorf("another repository is not in %s", csv)
	}
}
