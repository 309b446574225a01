package render

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/version"
)

// A Config is what the operator is started with. It does not change while it runs.
type Config struct {
	// Namespace is the operator's own, which everything is deployed to.
	Namespace string
	// Version is that of the operator and of what it deploys.
	Version string
	// Images are the images of containers by their name in the manifests, where they differ from those.
	Images map[string]string
	// Release is where the images of the operator's release are, and Registry where all images are, or empty.
	Release  Release
	Registry string
	// BuiltFor begins the names of the images of its release, if that of its own image is not known; empty for those of the manifests.
	BuiltFor string
	// Repository is where the runbooks are, or empty for that of the manifests.
	Repository string
	// Tag is that of the images of its release, if the name of its own image does not say it; empty for that of the manifests.
	Tag string
	// PartOf and VersionLabel are labels that the installer of the operator sets, or empty.
	PartOf, VersionLabel string
	// Verbosity is the --v of what is deployed, or negative for that of the manifests.
	Verbosity int
	// MonitoringNamespace is where Prometheus runs.
	MonitoringNamespace string
	// RunbookURL has one %s, for the name of an alert of the operator, in the URL of its runbook; empty for those of the repository.
	RunbookURL string
	// TLSCiphers and TLSMinVersion go before the TLS profile of the cluster, if they are not empty.
	TLSCiphers, TLSMinVersion string
}

// imageVariables are the environment variables that name an image, by the image's name in the manifests.
var imageVariables = map[string]string{
	mounterImage: "MOUNTER_IMAGE",
	"ghcr.io/kubevirt/hostpath-provisioner/hostpath-csi-driver":          "CSI_PROVISIONER_IMAGE",
	"ghcr.io/kubevirt/hostpath-provisioner/hostpath-provisioner":         "PROVISIONER_IMAGE",
	"registry.k8s.io/sig-storage/csi-provisioner":                        "CSI_SIG_STORAGE_PROVISIONER_IMAGE",
	"registry.k8s.io/sig-storage/csi-resizer":                            "CSI_RESIZER_IMAGE",
	"registry.k8s.io/sig-storage/csi-snapshotter":                        "CSI_SNAPSHOT_IMAGE",
	"registry.k8s.io/sig-storage/csi-node-driver-registrar":              "NODE_DRIVER_REG_IMAGE",
	"registry.k8s.io/sig-storage/livenessprobe":                          "LIVENESS_PROBE_IMAGE",
	"registry.k8s.io/sig-storage/csi-external-health-monitor-controller": "CSI_HEALTH_MONITOR_IMAGE",
}

const (
	// accountNamespace is where a container with a token finds the namespace of its pod.
	accountNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
	// usualNamespace is that of the manifests, these and the upstream operator's.
	usualNamespace = "hostpath-provisioner"
)

// namespaceOf is the namespace that a file has, or else the usual one, as the upstream operator finds its own.
func namespaceOf(path string) string {
	content, err := os.ReadFile(path)
	if namespace := strings.TrimSpace(string(content)); err == nil && namespace != "" {
		return namespace
	}
	return usualNamespace
}

// ConfigFromEnvironment reads what the environment says, and reports all of its problems together.
func ConfigFromEnvironment(getenv func(string) string) (Config, error) {
	or := func(name, otherwise string) string {
		if value := getenv(name); value != "" {
			return value
		}
		return otherwise
	}
	c := Config{
		Namespace:           or("POD_NAMESPACE", namespaceOf(accountNamespace)),
		Version:             or("VERSION", version.Of()),
		Registry:            getenv("IMAGE_REGISTRY"),
		BuiltFor:            version.Images(),
		Repository:          version.Repository(),
		Tag:                 version.Tag(),
		Images:              map[string]string{},
		PartOf:              getenv("INSTALLER_PART_OF_LABEL"),
		VersionLabel:        getenv("INSTALLER_VERSION_LABEL"),
		Verbosity:           -1,
		MonitoringNamespace: or("MONITORING_NAMESPACE", "monitoring"),
		RunbookURL:          getenv("RUNBOOK_URL_TEMPLATE"),
		TLSCiphers:          getenv("TLS_CIPHERS_OVERRIDE"),
		TLSMinVersion:       getenv("TLS_MIN_VERSION_OVERRIDE"),
	}
	var problems []error
	for image, variable := range imageVariables {
		if value := getenv(variable); value != "" {
			c.Images[image] = value
		}
	}
	if value := getenv("VERBOSITY"); value != "" {
		number, err := strconv.Atoi(value)
		if err != nil || number < 0 {
			problems = append(problems, fmt.Errorf("VERBOSITY is %q: it has to be a number from 0 on", value))
		}
		c.Verbosity = number
	}
	if c.RunbookURL != "" && (strings.Count(c.RunbookURL, "%s") != 1 || strings.Count(c.RunbookURL, "%") != 1) {
		problems = append(problems, fmt.Errorf("RUNBOOK_URL_TEMPLATE is %q: it has to have %%s once, for the name of an alert", c.RunbookURL))
	}
	return c, errors.Join(problems...)
}
