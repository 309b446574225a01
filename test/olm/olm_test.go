// Package olm_test checks the bundle with the rules of the Operator Lifecycle Manager (OLM), and has the output of csv-generator go the way that
// it goes in the HyperConverged Cluster Operator (HCO) of KubeVirt.
package olm_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/operator-framework/api/pkg/manifests"
	"github.com/operator-framework/api/pkg/operators/v1alpha1"
	"github.com/operator-framework/api/pkg/validation"
	interfaces "github.com/operator-framework/api/pkg/validation/interfaces"
	"sigs.k8s.io/yaml"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/olm"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// rightsToOldAPIs is a warning for rules about events and EndpointSlices, which name no version: the first versions of both are gone.
var rightsToOldAPIs = regexp.MustCompile(`deprecated and removed in v1\.25.* Migrate the API\(s\) for (events|endpointslices): `)

// validators are all that are for a bundle, but for the one that pulls the images.
var validators = interfaces.Validators{
	validation.ClusterServiceVersionValidator, validation.CustomResourceDefinitionValidator, validation.BundleValidator, validation.ObjectValidator,
	validation.OperatorHubV2Validator, validation.StandardCategoriesValidator, validation.StandardCapabilitiesValidator,
	validation.GoodPracticesValidator, validation.AlphaDeprecatedAPIsValidator,
}

// What `operator-sdk bundle validate --select-optional suite=operatorframework` checks.
func TestBundleIsValid(t *testing.T) {
	dir := t.TempDir()
	files, err := olm.Options{Version: "0.2.0", Replaces: olm.Name + ".v0.1.0", Image: "example.com/hpp/" + olm.Name + ":v0.2.0"}.Bundle()
	must.Succeed(t, err)
	for name, content := range files {
		path := filepath.Join(dir, name)
		must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must.Succeed(t, os.WriteFile(path, content, 0o600))
	}
	bundle, err := manifests.GetBundleFromDir(dir)
	must.Succeed(t, err)
	if bundle.Package != olm.Name || bundle.DefaultChannel == "" || len(bundle.Channels) != 1 || len(bundle.Objects) != 4 {
		t.Errorf("the package is %s with the channels %q, %q by default, and %d objects", bundle.Package, bundle.Channels, bundle.DefaultChannel, len(bundle.Objects))
	}
	objects := []any{bundle, bundle.CSV}
	for _, definition := range bundle.V1CRDs {
		objects = append(objects, definition)
	}
	for _, result := range validators.Validate(objects...) {
		for _, problem := range result.Errors {
			t.Errorf("%s: %v", result.Name, problem)
		}
		for _, problem := range result.Warnings {
			if !rightsToOldAPIs.MatchString(problem.Error()) {
				t.Errorf("%s: %v", result.Name, problem)
			}
		}
	}
	for _, label := range []string{"arch.amd64", "arch.arm64", "os.linux"} {
		if bundle.CSV.Labels["operatorframework.io/"+label] != "supported" {
			t.Errorf("%s is not supported: %v", label, bundle.CSV.Labels)
		}
	}
	dockerfile := string(files["bundle.Dockerfile"])
	var metadata struct{ Annotations map[string]string }
	must.Succeed(t, yaml.Unmarshal(files["metadata/annotations.yaml"], &metadata))
	for key, value := range metadata.Annotations {
		if !strings.Contains(dockerfile, "\nLABEL "+key+"="+value+"\n") {
			t.Errorf("the image has no label %s=%s", key, value)
		}
	}
}

// hco calls the generator with the flags of its hack/build-manifests.sh, and splits what it prints as its manifest-splitter does.
func hco(t *testing.T) (csv v1alpha1.ClusterServiceVersion, documents map[string]string) {
	t.Helper()
	const images = "quay.io/example/"
	var out bytes.Buffer
	must.Succeed(t, olm.Generate([]string{
		"--csv-version=1.19.0", "--operator-image-name=" + images + olm.Name + "@sha256:" + strings.Repeat("0", 64),
		"--provisioner-image-name=" + images + "provisioner", "--csi-driver-image-name=" + images + "driver",
		"--csi-node-driver-image-name=" + images + "registrar", "--csi-liveness-probe-image-name=" + images + "livenessprobe",
		"--csi-external-provisioner-image-name=" + images + "csi-provisioner", "--csi-snapshotter-image-name=" + images + "snapshotter",
		"--namespace=kubevirt-hyperconverged", "--pull-policy=IfNotPresent", "--dump-crds",
	}, &out))
	documents = map[string]string{}
	var text strings.Builder
	kind := ""
	end := func() {
		if text.Len() > 0 {
			documents[kind] += text.String() // it numbers definitions
		}
		text.Reset()
		kind = ""
	}
	// A line longer than the scanner's 64 KiB would end the file for HCO.
	lines := bufio.NewScanner(&out)
	for lines.Scan() {
		line := lines.Text()
		if line == "---" {
			end()
			continue
		}
		if name, ok := strings.CutPrefix(line, "kind: "); ok {
			if kind != "" {
				t.Fatalf("a document has the kinds %s and %s", kind, name)
			}
			kind = name
		}
		text.WriteString(line + "\n")
	}
	must.Succeed(t, lines.Err())
	end()
	must.Succeed(t, yaml.UnmarshalStrict([]byte(documents["ClusterServiceVersion"]), &csv))
	return csv, documents
}

// HCO takes Deployments, rights, webhooks, definitions, examples and images into a ClusterServiceVersion of its own.
func TestHCOMergesTheOutput(t *testing.T) {
	csv, documents := hco(t)
	if len(documents) != 2 || documents["CustomResourceDefinition"] == "" {
		t.Errorf("%d documents", len(documents))
	}
	// Its check that a component has an image.
	if !regexp.MustCompile(`(?m)^ *image: [_a-zA-Z0-9/.:@-]+$`).MatchString(documents["ClusterServiceVersion"]) {
		t.Error("HCO finds no image")
	}
	strategy := csv.Spec.InstallStrategy.StrategySpec
	if csv.Spec.InstallStrategy.StrategyName != "deployment" || len(strategy.DeploymentSpecs) != 1 || len(strategy.Permissions) != 1 || len(strategy.ClusterPermissions) != 1 {
		t.Fatalf("the strategy is %+v", csv.Spec.InstallStrategy)
	}
	deployment := strategy.DeploymentSpecs[0]
	for _, right := range append(strategy.Permissions, strategy.ClusterPermissions...) {
		if right.ServiceAccountName != deployment.Spec.Template.Spec.ServiceAccountName || len(right.Rules) == 0 {
			t.Errorf("the account %s has %d rules", right.ServiceAccountName, len(right.Rules))
		}
	}
	if len(csv.Spec.WebhookDefinitions) != 2 {
		t.Errorf("%d webhooks", len(csv.Spec.WebhookDefinitions))
	}
	for _, hook := range csv.Spec.WebhookDefinitions {
		// Without OLM HCO makes a Service of the name, the selector and the port.
		if hook.DeploymentName != deployment.Name || hook.ContainerPort != hook.TargetPort.IntVal || hook.WebhookPath == nil {
			t.Errorf("the webhook is %+v", hook)
		}
	}
	owned := csv.Spec.CustomResourceDefinitions.Owned
	for _, one := range owned {
		if !strings.Contains(documents["CustomResourceDefinition"], "\n  name: "+one.Name+"\n") {
			t.Errorf("it owns %+v", one)
		}
	}
	if len(owned) != 2 {
		t.Errorf("it owns %+v", owned)
	}
	var examples []hppv1.HostPathProvisioner
	must.Succeed(t, json.Unmarshal([]byte(csv.Annotations["alm-examples"]), &examples))
	if len(examples) != 2 || len(examples[0].Spec.StoragePools) == 0 || examples[1].Kind != "VolumeMove" {
		t.Errorf("the examples are %+v", examples)
	}
	if images := csv.Spec.RelatedImages; len(images) != 10 || images[0].Image != deployment.Spec.Template.Spec.Containers[0].Image {
		t.Errorf("the images are %+v", images)
	}
}
