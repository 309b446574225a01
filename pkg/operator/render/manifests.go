package render

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/deploy"
)

// Manifests are those of deploy/, decoded and not changed yet.
type Manifests struct {
	daemonSet appsv1.DaemonSet
	// snapshotter and freezer are added to the DaemonSet with their feature gates.
	snapshotter, freezer addition
	csiDriver            storagev1.CSIDriver
	// metricsService is that of the driver, and operatorService that of the operator itself.
	metricsService, operatorService corev1.Service
	// clusterRules and namespacedRules are those of all sidecars together, but for snapshotRules, those for snapshots.
	clusterRules, namespacedRules, snapshotRules []rbacv1.PolicyRule
	mounter                                      appsv1.Deployment
	unmount                                      batchv1.Job
	// images have the tag of each image by its name, with its digest if it has one.
	images map[string]string
	legacy legacyManifests

	constraints      *unstructured.Unstructured
	constraintsRules []rbacv1.PolicyRule
	driverRule       *unstructured.Unstructured
	operatorRule     *unstructured.Unstructured
	serviceMonitor   *unstructured.Unstructured
	operatorMonitor  *unstructured.Unstructured
}

type legacyManifests struct {
	daemonSet        appsv1.DaemonSet
	metricsService   corev1.Service
	rules            []rbacv1.PolicyRule
	constraints      *unstructured.Unstructured
	constraintsRules []rbacv1.PolicyRule
}

// Load decodes the manifests. It fails only if the program was built of broken ones.
func Load() (*Manifests, error) {
	m := &Manifests{}
	var cluster, snapshots, scc rules
	err := errors.Join(
		One(&m.daemonSet, "csi/base/daemonset.yaml"),
		m.snapshotter.read("csi/snapshots/csi-snapshotter.yaml"),
		m.freezer.read("csi/freeze/freezer.yaml"),
		One(&m.csiDriver, "csi/base/csidriver.yaml"),
		One(&m.mounter, "operator/mounter/deployment.yaml"),
		One(&m.unmount, "operator/mounter/unmount.yaml"),
		One(&m.metricsService, "csi/base/metrics-service.yaml"),
		One(&m.operatorService, "operator/monitoring/metrics-service.yaml"),
		cluster.read("csi/base/rbac.yaml"),
		snapshots.read("csi/snapshots/rbac.yaml"),
		scc.read("csi/openshift/rbac.yaml"),
		One(&m.constraints, "csi/openshift/securitycontextconstraints.yaml"),
		One(&m.driverRule, "monitoring/prometheusrule.yaml"),
		One(&m.operatorRule, "operator/monitoring/prometheusrule.yaml"),
		One(&m.serviceMonitor, "monitoring/servicemonitor.yaml"),
		One(&m.operatorMonitor, "operator/monitoring/servicemonitor.yaml"),
	)
	if err != nil {
		return nil, err
	}
	m.clusterRules, m.namespacedRules, m.snapshotRules, m.constraintsRules = cluster.cluster, cluster.namespaced, snapshots.cluster, scc.namespaced
	m.images = map[string]string{}
	if err := errors.Join(m.legacy.load(), m.addTags("csi/base/kustomization.yaml"), m.addTags("csi/snapshots/kustomization.yaml"), m.addTags("provisioner/base/kustomization.yaml")); err != nil {
		return nil, err
	}
	// The mounter is of the same release as the driver.
	m.images[mounterImage] = m.images["ghcr.io/kubevirt/hostpath-provisioner/hostpath-csi-driver"]
	return m, nil
}

// An addition is what a patch by RFC 6902 adds to the lists of a pod.
type addition struct {
	containers []corev1.Container
	volumes    []corev1.Volume
}

func (a *addition) read(file string) error {
	var operations []struct {
		Op, Path string
		Value    json.RawMessage
	}
	if err := One(&operations, file); err != nil {
		return err
	}
	for _, o := range operations {
		var err error
		switch o.Op + " " + o.Path {
		case "add /spec/template/spec/containers/-":
			a.containers = append(a.containers, corev1.Container{})
			err = json.Unmarshal(o.Value, &a.containers[len(a.containers)-1])
		case "add /spec/template/spec/volumes/-":
			a.volumes = append(a.volumes, corev1.Volume{})
			err = json.Unmarshal(o.Value, &a.volumes[len(a.volumes)-1])
		default:
			err = errors.New("only a container or a volume can be added, at the end of its list")
		}
		if err != nil {
			return fmt.Errorf("decode deploy/%s: %s %s: %w", file, o.Op, o.Path, err)
		}
	}
	return nil
}

func (a *addition) to(pod *corev1.PodSpec) {
	for i := range a.containers {
		pod.Containers = append(pod.Containers, *a.containers[i].DeepCopy())
	}
	for i := range a.volumes {
		pod.Volumes = append(pod.Volumes, *a.volumes[i].DeepCopy())
	}
}

func (m *legacyManifests) load() error {
	var cluster, scc rules
	err := errors.Join(
		One(&m.daemonSet, "provisioner/base/daemonset.yaml"),
		One(&m.metricsService, "provisioner/base/metrics-service.yaml"),
		cluster.read("provisioner/base/rbac.yaml"),
		scc.read("provisioner/openshift/rbac.yaml"),
		One(&m.constraints, "provisioner/openshift/securitycontextconstraints.yaml"),
	)
	m.rules, m.constraintsRules = cluster.cluster, scc.namespaced
	return err
}

type rules struct{ cluster, namespaced []rbacv1.PolicyRule }

func (r *rules) read(file string) error {
	// A Role has the fields of a ClusterRole that matter here, and the other kinds of the file have no rules.
	roles, err := Documents[rbacv1.ClusterRole](file)
	for _, role := range roles {
		switch role.Kind {
		case "ClusterRole":
			r.cluster = append(r.cluster, role.Rules...)
		case "Role":
			r.namespaced = append(r.namespaced, role.Rules...)
		}
	}
	return err
}

func (m *Manifests) addTags(file string) error {
	var kustomization struct {
		Images []struct{ Name, NewTag, Digest string }
	}
	if err := One(&kustomization, file); err != nil {
		return err
	}
	for _, image := range kustomization.Images {
		m.images[image.Name] = image.NewTag
		if image.Digest != "" {
			m.images[image.Name] += "@" + image.Digest
		}
	}
	return nil
}

// One decodes the only document of a file.
func One[T any](to *T, file string) error {
	found, err := Documents[T](file)
	if err != nil {
		return err
	}
	if len(found) != 1 {
		return fmt.Errorf("deploy/%s has %d documents, want 1", file, len(found))
	}
	*to = found[0]
	return nil
}

// Documents decodes all documents of a file of deploy/.
func Documents[T any](file string) ([]T, error) {
	content, err := deploy.Files.ReadFile(file)
	if err != nil {
		return nil, err
	}
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	var found []T
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read deploy/%s: %w", file, err)
		}
		var decoded T
		if err := yaml.Unmarshal(document, &decoded); err != nil {
			return nil, fmt.Errorf("decode deploy/%s: %w", file, err)
		}
		found = append(found, decoded)
	}
}
