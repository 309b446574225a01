package render

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func legacySet(t *testing.T, objects map[string]*unstructured.Unstructured) *appsv1.DaemonSet {
	t.Helper()
	set := &appsv1.DaemonSet{}
	must.Succeed(t, runtime.DefaultUnstructuredConverter.FromUnstructured(objects["DaemonSet "+LegacyDaemonSet].Object, set))
	return set
}

func legacySpec() hppv1.HostPathProvisionerSpec {
	return hppv1.HostPathProvisionerSpec{PathConfig: &hppv1.PathConfig{Path: "/var/old", UseNamingPrefix: true}}
}

// The objects of the pre-CSI provisioner have the names that users have in their clusters.
func TestLegacyNames(t *testing.T) {
	spec := legacySpec()
	with, without := rendered(t, testConfig, allFacts, spec), rendered(t, testConfig, allFacts, onePoolSpec())
	added := slices.DeleteFunc(sortedKeys(with), func(name string) bool { return without[name] != nil })
	want := []string{
		"ClusterRole hostpath-provisioner",
		"ClusterRoleBinding hostpath-provisioner",
		"DaemonSet hostpath-provisioner",
		"Role hostpath-provisioner",
		"RoleBinding hostpath-provisioner",
		"SecurityContextConstraints hostpath-provisioner",
		"Service hostpath-provisioner-metrics",
		"ServiceAccount hostpath-provisioner-admin",
	}
	if diff := cmp.Diff(want, added); diff != "" {
		t.Error(diff)
	}
	for _, name := range added {
		for key, value := range Owned {
			if with[name].GetLabels()[key] != value {
				t.Errorf("%s has no label %s=%s, and would stay when pathConfig goes", name, key, value)
			}
		}
	}
	if diff := cmp.Diff([]string{DriverDaemonSet, LegacyDaemonSet}, DaemonSets(&hppv1.HostPathProvisioner{Spec: spec})); diff != "" {
		t.Errorf("availability does not wait for both DaemonSets: %s", diff)
	}
}

// The path is the same in the container as on the host: it is what PersistentVolumes say.
func TestLegacyPath(t *testing.T) {
	level := int32(4)
	spec := legacySpec()
	spec.LogLevel, spec.Workload.NodeSelector = &level, map[string]string{"storage": "yes"}
	config := testConfig
	config.Images = map[string]string{"ghcr.io/kubevirt/hostpath-provisioner/hostpath-provisioner": "example.com/provisioner:1"}
	set := legacySet(t, rendered(t, config, allFacts, spec))
	pod := set.Spec.Template.Spec
	c := containerOf(t, set, legacyContainer)
	if variable(c, "PV_DIR") != "/var/old" || variable(c, "USE_NAMING_PREFIX") != "true" {
		t.Errorf("the environment is %v", c.Env)
	}
	if !slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "pool" && m.MountPath == "/var/old" }) ||
		!slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "pool" && v.HostPath.Path == "/var/old" }) {
		t.Errorf("/var/old is not mounted: %v of %v", c.VolumeMounts, pod.Volumes)
	}
	if c.Image != "example.com/provisioner:1" || !slices.Contains(c.Args, "--v=4") || pod.NodeSelector["storage"] != "yes" ||
		pod.ServiceAccountName != "hostpath-provisioner-admin" || set.Spec.Template.Annotations[requiredConstraints] != "hostpath-provisioner" {
		t.Errorf("the pod does not have what the object says: %+v", pod)
	}
}

// Neither DaemonSet selects the pods of the other.
func TestLegacySelector(t *testing.T) {
	objects := rendered(t, testConfig, allFacts, legacySpec())
	driver, provisioner := driverSet(t, objects), legacySet(t, objects)
	if cmp.Equal(driver.Spec.Selector, provisioner.Spec.Selector) {
		t.Errorf("both select %v", driver.Spec.Selector)
	}
}

// The pods that ask the API server may do so where KubeVirt's network policies are.
func TestPodsReachTheAPIServer(t *testing.T) {
	objects := rendered(t, testConfig, allFacts, legacySpec())
	for _, set := range []*appsv1.DaemonSet{driverSet(t, objects), legacySet(t, objects)} {
		if set.Spec.Template.Labels["np.kubevirt.io/allow-access-cluster-services"] != "true" {
			t.Errorf("the pods of %s have the labels %v", set.Name, set.Spec.Template.Labels)
		}
	}
}
