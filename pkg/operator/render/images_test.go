package render

import (
	"strings"
	"testing"
)

func TestImagesFollowTheOperator(t *testing.T) {
	for name, test := range map[string]struct {
		operator, registry string
		driver, sidecar    string
	}{
		"its image is not known":   {"", "", "ghcr.io/kubevirt/hostpath-provisioner/hostpath-csi-driver:v8.9.0", "registry.k8s.io/sig-storage/csi-provisioner:"},
		"another registry and tag": {"mirror.example.com:5000/storage/hostpath-provisioner-operator:v9", "", "mirror.example.com:5000/storage/hostpath-csi-driver:v9", "registry.k8s.io/sig-storage/csi-provisioner:"},
		"a digest beside the tag":  {"mirror.example.com/hostpath-provisioner-operator:v9@sha256:abc", "", "mirror.example.com/hostpath-csi-driver:v9", "registry.k8s.io/sig-storage/csi-provisioner:"},
		// HCO names it so. The manifests have the tag of another release.
		"a digest and no tag":       {"mirror.example.com/hostpath-provisioner-operator@sha256:abc", "", "mirror.example.com/hostpath-csi-driver:v8.9.0", "registry.k8s.io/sig-storage/csi-provisioner:"},
		"no registry":               {"hostpath-provisioner-operator:v9", "", "hostpath-csi-driver:v9", "registry.k8s.io/sig-storage/csi-provisioner:"},
		"one registry for all":      {"ghcr.io/kubevirt/hostpath-provisioner/hostpath-provisioner-operator:v9", "mirror.example.com/all", "mirror.example.com/all/hostpath-csi-driver:v9", "mirror.example.com/all/csi-provisioner:"},
		"one registry with a slash": {"", "mirror.example.com/", "mirror.example.com/hostpath-csi-driver:", "mirror.example.com/csi-provisioner:"},
	} {
		t.Run(name, func(t *testing.T) {
			config := testConfig
			config.Images, config.Registry, config.Tag = nil, test.registry, "v8.9.0"
			if test.operator != "" {
				var err error
				if config.Release, err = ReleaseOf(test.operator); err != nil {
					t.Fatal(err)
				}
			}
			set := driverSet(t, rendered(t, config, allFacts, onePoolSpec()))
			if got := containerOf(t, set, driverContainer).Image; !strings.HasPrefix(got, test.driver) {
				t.Errorf("the driver is %s, want %s", got, test.driver)
			}
			if got := containerOf(t, set, provisionerContainer).Image; !strings.HasPrefix(got, test.sidecar) {
				t.Errorf("the sidecar is %s, want %s", got, test.sidecar)
			}
		})
	}
	config := testConfig
	config.BuiltFor, config.Tag = "registry.example.com/storage/", "v9"
	if got := containerOf(t, driverSet(t, rendered(t, config, allFacts, onePoolSpec())), driverContainer).Image; got != "registry.example.com/storage/hostpath-csi-driver:v9" {
		t.Errorf("where its image is not known the driver is %s", got)
	}
	if _, err := ReleaseOf("example.com/renamed:v9"); err == nil {
		t.Error("the registry of an image with another name is taken")
	}
}

// A version is built in, so that it is that of the program whatever a kustomization makes of its image.
func TestVersionNeedsNoVariable(t *testing.T) {
	config, err := ConfigFromEnvironment(func(name string) string { return map[string]string{"POD_NAMESPACE": "storage"}[name] })
	if err != nil || config.Version == "" {
		t.Errorf("the version is %q, %v", config.Version, err)
	}
	set := driverSet(t, rendered(t, testConfig, allFacts, onePoolSpec()))
	if c := containerOf(t, set, driverContainer); strings.Contains(strings.Join(c.Args, " "), "--version") || variable(c, "VERSION") != "" {
		t.Errorf("the driver is told its version: %q", c.Args)
	}
}
