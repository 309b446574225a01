package render

import (
	"encoding/json"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/version"
	"kubevirt.io/hostpath-provisioner/test/must"
)

var testConfig = Config{Namespace: "storage", Version: "v1.2.3", Verbosity: -1, MonitoringNamespace: "monitoring", RunbookURL: "https://example.com/%s.md", Repository: "https://git.example.com/storage"}

var allFacts = Facts{OpenShift: true, Monitoring: true}

// rendered has the objects by "Kind name".
func rendered(t *testing.T, config Config, facts Facts, spec hppv1.HostPathProvisionerSpec) map[string]*unstructured.Unstructured {
	t.Helper()
	m, err := Load()
	must.Succeed(t, err)
	object := &hppv1.HostPathProvisioner{ObjectMeta: metav1.ObjectMeta{Name: "hpp", UID: "uid"}, Spec: spec}
	before := object.DeepCopy()
	all, err := m.For(config, facts, object).Objects()
	must.Succeed(t, err)
	if diff := cmp.Diff(before, object); diff != "" {
		t.Errorf("rendering has changed the object: %s", diff)
	}
	again, err := m.For(config, facts, object).Objects()
	must.Succeed(t, err)
	if diff := cmp.Diff(all, again); diff != "" {
		t.Errorf("rendering twice is not the same: %s", diff)
	}
	found := map[string]*unstructured.Unstructured{}
	for _, o := range all {
		found[o.GetKind()+" "+o.GetName()] = o
	}
	return found
}

// Volumes of shared pools are of no node. The policy that holds the token of a node to what is of that goes by what the CSIDriver says of them.
func TestSharedPoolsAreSaidToThePolicy(t *testing.T) {
	spec := onePoolSpec()
	spec.StoragePools = append(spec.StoragePools, hppv1.StoragePool{Name: "nfs", Path: "/var/nfs", Shared: true},
		hppv1.StoragePool{Name: "everywhere", Path: "/var/everywhere", PVCTemplate: &hppv1.ClaimTemplate{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}}})
	for want, of := range map[string]hppv1.HostPathProvisionerSpec{"": onePoolSpec(), "nfs,everywhere": spec} {
		driver := rendered(t, testConfig, allFacts, of)["CSIDriver "+DriverName]
		if got, has := driver.GetAnnotations()[sharedAnnotation]; got != want || has != (want != "") {
			t.Errorf("the annotations of the CSIDriver are %q, want the pools %q", driver.GetAnnotations(), want)
		}
	}
	policy, err := os.ReadFile("../../../deploy/operator/node-policy.yaml")
	must.Succeed(t, err)
	for _, want := range []string{"params.metadata.?annotations[?'" + sharedAnnotation + "'].orValue('').split(',')", "\n    name: " + DriverName + "\n"} {
		if !strings.Contains(string(policy), want) {
			t.Errorf("the policy has no %q", want)
		}
	}
}

func onePoolSpec() hppv1.HostPathProvisionerSpec {
	return hppv1.HostPathProvisionerSpec{StoragePools: []hppv1.StoragePool{{Name: "local", Path: "/var/hpvolumes"}}}
}

func driverSet(t *testing.T, objects map[string]*unstructured.Unstructured) *appsv1.DaemonSet {
	t.Helper()
	set := &appsv1.DaemonSet{}
	must.Succeed(t, runtime.DefaultUnstructuredConverter.FromUnstructured(objects["DaemonSet "+DriverDaemonSet].Object, set))
	return set
}

func containerOf(t *testing.T, set *appsv1.DaemonSet, name string) corev1.Container {
	t.Helper()
	i := slices.IndexFunc(set.Spec.Template.Spec.Containers, func(c corev1.Container) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("there is no container %s", name)
	}
	return set.Spec.Template.Spec.Containers[i]
}

func variable(c corev1.Container, name string) string {
	i := slices.IndexFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == name })
	if i < 0 {
		return ""
	}
	return c.Env[i].Value
}

// Names are those that users have in their clusters, and everything belongs to the operator by its labels.
func TestRenderNames(t *testing.T) {
	objects := rendered(t, testConfig, allFacts, onePoolSpec())
	want := []string{
		"CSIDriver kubevirt.io.hostpath-provisioner",
		"ClusterRole hostpath-provisioner-admin-csi",
		"ClusterRoleBinding hostpath-provisioner-admin-csi",
		"DaemonSet hostpath-provisioner-csi",
		"PrometheusRule prometheus-hpp-rules",
		"Role hostpath-provisioner-admin-csi",
		"Role hostpath-provisioner-monitoring",
		"RoleBinding hostpath-provisioner-admin-csi",
		"RoleBinding hostpath-provisioner-monitoring",
		"SecurityContextConstraints hostpath-provisioner-csi",
		"Service hostpath-provisioner-operator-metrics",
		"Service hpp-prometheus-metrics",
		"ServiceAccount hostpath-provisioner-admin-csi",
		"ServiceMonitor service-monitor-hpp",
		"ServiceMonitor service-monitor-hpp-operator",
	}
	if diff := cmp.Diff(want, sortedKeys(objects)); diff != "" {
		t.Error(diff)
	}
	for name, o := range objects {
		for key, value := range Owned {
			if o.GetLabels()[key] != value {
				t.Errorf("%s has no label %s=%s", name, key, value)
			}
		}
		cluster := []string{"CSIDriver", "ClusterRole", "ClusterRoleBinding", "SecurityContextConstraints"}
		if slices.Contains(cluster, o.GetKind()) != (o.GetNamespace() == "") {
			t.Errorf("%s is in namespace %q", name, o.GetNamespace())
		}
		if len(o.GetOwnerReferences()) != 0 {
			t.Errorf("%s has owners %v: a deletion in the foreground would remove it at once", name, o.GetOwnerReferences())
		}
	}
}

// The pods say themselves which container gets a token. What is said in the account would stay if the upstream operator took over again,
// whose pods rely on the default.
func TestAccountsMountTokensByDefault(t *testing.T) {
	spec := onePoolSpec()
	spec.StoragePools, spec.PathConfig = nil, &hppv1.PathConfig{Path: "/var/hpvolumes"}
	accounts := 0
	for _, object := range rendered(t, testConfig, allFacts, spec) {
		if object.GetKind() != "ServiceAccount" {
			continue
		}
		accounts++
		if _, says := object.Object["automountServiceAccountToken"]; says {
			t.Errorf("the account %s says whether tokens are mounted", object.GetName())
		}
	}
	if accounts != 2 {
		t.Errorf("%d accounts", accounts)
	}
}

func TestRenderWithoutOpenShiftAndMonitoring(t *testing.T) {
	for name := range rendered(t, testConfig, Facts{}, onePoolSpec()) {
		if strings.HasPrefix(name, "Security") || strings.Contains(name, "rometheus") || strings.Contains(name, "onitor") {
			t.Errorf("%s is made in a cluster that does not know its kind", name)
		}
	}
}

func TestRenderPools(t *testing.T) {
	reflink, yes := "reflink", true
	tests := map[string]struct {
		spec hppv1.HostPathProvisionerSpec
		want []map[string]any
	}{
		"plain": {onePoolSpec(), []map[string]any{{"name": "local", "path": "/var/hpvolumes/csi", "shared": false}}},
		"path of the upstream provisioner": {
			hppv1.HostPathProvisionerSpec{PathConfig: &hppv1.PathConfig{Path: "/var/old"}},
			[]map[string]any{{"name": "legacy", "path": "/var/old/csi", "shared": false}},
		},
		"all options": {
			hppv1.HostPathProvisionerSpec{StoragePools: []hppv1.StoragePool{{
				Name: "fast", Path: "/mnt/fast", SnapshotProvider: &reflink, RequireMount: &yes, Enforcement: "required", Reserve: "5%",
				Overprovision: "1.5", Allocation: "thin", BytesPerInode: new(int64), Relabel: "none", AllowReadWriteMany: true,
			}}},
			[]map[string]any{{
				"name": "fast", "path": "/mnt/fast/csi", "shared": false, "snapshotProvider": "reflink", "snapshotPath": "/mnt/fast/csi/snapshots",
				"requireMount": true, "enforcement": "required", "reserve": "5%", "overprovision": 1.5, "allocation": "thin",
				"bytesPerInode": float64(0), "relabel": "none", "allowReadWriteMany": true,
			}},
		},
		"claims": {
			hppv1.HostPathProvisionerSpec{StoragePools: []hppv1.StoragePool{
				{Name: "own", Path: "/mnt/own", PVCTemplate: &hppv1.ClaimTemplate{}},
				{Name: "shared", Path: "/mnt/shared", PVCTemplate: &hppv1.ClaimTemplate{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}}},
			}},
			[]map[string]any{
				{"name": "own", "path": "/mnt/own/csi", "shared": false, "requireMount": true},
				{"name": "shared", "path": "/mnt/shared/csi", "shared": true, "requireMount": true},
			},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			set := driverSet(t, rendered(t, testConfig, allFacts, tt.spec))
			driver := containerOf(t, set, driverContainer)
			var got []map[string]any
			must.Succeed(t, json.Unmarshal([]byte(variable(driver, "DATADIR")), &got))
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
			for _, pool := range got {
				path := strings.TrimSuffix(pool["path"].(string), "/csi")
				if !slices.ContainsFunc(driver.VolumeMounts, func(m corev1.VolumeMount) bool {
					return m.MountPath == path && *m.MountPropagation == corev1.MountPropagationHostToContainer
				}) {
					t.Errorf("%s is not mounted into the driver", path)
				}
			}
		})
	}
}

func TestRenderSelectsItsPods(t *testing.T) {
	set := driverSet(t, rendered(t, testConfig, allFacts, onePoolSpec()))
	if _, legacy := set.Spec.Selector.MatchLabels[AppLabel]; legacy {
		t.Error("a new DaemonSet selects the pods of the other one too")
	}
	for key, value := range set.Spec.Selector.MatchLabels {
		if set.Spec.Template.Labels[key] != value {
			t.Errorf("the pods lack %s=%s", key, value)
		}
	}
}

func TestRenderFollowsObject(t *testing.T) {
	level := int32(5)
	spec := onePoolSpec()
	spec.ImagePullPolicy = corev1.PullAlways
	spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "registry"}}
	spec.PriorityClassName = "important"
	spec.LogLevel = &level
	spec.KubeletDirectory = "/var/snap/kubelet"
	spec.Workload = hppv1.NodePlacement{
		NodeSelector: map[string]string{"storage": "yes"},
		Tolerations:  []corev1.Toleration{{Key: "storage", Operator: corev1.TolerationOpExists}},
	}
	config := testConfig
	config.Images = map[string]string{"ghcr.io/kubevirt/hostpath-provisioner/hostpath-csi-driver": "example.com/driver:1"}
	set := driverSet(t, rendered(t, config, allFacts, spec))
	pod := set.Spec.Template.Spec
	if pod.PriorityClassName != "important" || pod.NodeSelector["storage"] != "yes" || len(pod.NodeSelector) != 1 ||
		len(pod.Tolerations) != 1 || pod.ImagePullSecrets[0].Name != "registry" {
		t.Errorf("the pod does not have what the object says: %+v", pod)
	}
	for _, c := range pod.Containers {
		if !slices.Contains(c.Args, "--v=5") || c.ImagePullPolicy != corev1.PullAlways {
			t.Errorf("container %s has %q and %s", c.Name, c.Args, c.ImagePullPolicy)
		}
		for _, arg := range c.Args {
			if strings.Contains(arg, kubeletDirectory) {
				t.Errorf("container %s still has %s", c.Name, arg)
			}
		}
		for _, m := range c.VolumeMounts {
			if strings.HasPrefix(m.MountPath, kubeletDirectory) {
				t.Errorf("container %s still has %s", c.Name, m.MountPath)
			}
		}
	}
	for _, v := range pod.Volumes {
		if v.HostPath != nil && strings.HasPrefix(v.HostPath.Path, kubeletDirectory) {
			t.Errorf("volume %s is still at %s", v.Name, v.HostPath.Path)
		}
	}
	if got := containerOf(t, set, driverContainer); got.Image != "example.com/driver:1" {
		t.Errorf("the driver is %s", got.Image)
	}
}

// Two shared pools that name no class do not get one class between them by chance (the second is reported).
func TestOverlayClasses(t *testing.T) {
	shared := &hppv1.ClaimTemplate{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}}
	object := &hppv1.HostPathProvisioner{Spec: hppv1.HostPathProvisionerSpec{StoragePools: []hppv1.StoragePool{
		{Name: "a", Path: "/a", PVCTemplate: shared}, {Name: "b", Path: "/b", PVCTemplate: shared},
		{Name: "c", Path: "/c", PVCTemplate: shared, OverlayClassName: "own"},
	}}}
	if diff := cmp.Diff(map[string]string{hppv1.DefaultOverlayClass: "a", "own": "c"}, overlayPools(Pools(object))); diff != "" {
		t.Error(diff)
	}
	if texts := Notices(object); len(texts) != 1 || !strings.Contains(texts[0], "pool b has no StorageClass") {
		t.Errorf("the notices are %q", texts)
	}
}

// The operator's own rules are for its namespace, with the runbooks that are configured, and the driver's are next to them.
func TestRenderRules(t *testing.T) {
	rule := rendered(t, testConfig, allFacts, onePoolSpec())["PrometheusRule prometheus-hpp-rules"]
	text, err := json.Marshal(rule.Object)
	must.Succeed(t, err)
	for _, want := range []string{
		"sum(up{namespace='storage', pod=~'hostpath-provisioner-operator-.*'}", "https://example.com/HPPNotReady.md",
		"HPPOperatorDown", "HPPSharingPoolPathWithOS", "HostPathPoolNotServing", "cluster:kubevirt_hpp_operator_up:sum",
		"https://git.example.com/storage/blob/main/docs/runbooks/HostPathPoolNotServing.md",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the rules lack %s", want)
		}
	}
	if strings.Contains(string(text), version.DefaultRepository) {
		t.Error("a runbook is in another repository than the release")
	}
}

// All runbooks are in the repository that the operator was built for, and none in that of another project.
func TestRunbooksAreThoseOfTheRepository(t *testing.T) {
	c, err := ConfigFromEnvironment(func(string) string { return "" })
	must.Succeed(t, err)
	if c.Repository != version.DefaultRepository || c.RunbookURL != "" {
		t.Errorf("without a variable the runbooks are at %s and %q", c.Repository, c.RunbookURL)
	}
	const other = "https://git.example.com/storage/hostpath"
	config := testConfig
	config.Repository, config.RunbookURL = other, ""
	text, err := json.Marshal(rendered(t, config, allFacts, onePoolSpec())["PrometheusRule prometheus-hpp-rules"].Object)
	must.Succeed(t, err)
	alerts, links := strings.Count(string(text), `"alert":`), strings.Count(string(text), `"runbook_url":"`+other+"/blob/main/docs/")
	if alerts < 10 || links != alerts {
		t.Errorf("%d of %d alerts have a runbook in the repository", links, alerts)
	}
}

func TestConfigFromEnvironmentReportsAllProblems(t *testing.T) {
	environment := map[string]string{"VERBOSITY": "much", "RUNBOOK_URL_TEMPLATE": "https://example.com/"}
	_, err := ConfigFromEnvironment(func(name string) string { return environment[name] })
	for _, want := range []string{"VERBOSITY", "RUNBOOK_URL_TEMPLATE"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
}

// The upstream operator has no variable for its namespace, and manifests made for it set none.
func TestNamespaceWithoutVariable(t *testing.T) {
	at := filepath.Join(t.TempDir(), "namespace")
	for content, want := range map[string]string{"storage": "storage", "storage\n": "storage", "": usualNamespace} {
		must.Succeed(t, os.WriteFile(at, []byte(content), 0o600))
		if got := namespaceOf(at); got != want {
			t.Errorf("%q: %q", content, got)
		}
	}
	if got := namespaceOf(at + "/none"); got != usualNamespace {
		t.Errorf("without the file: %q", got)
	}
	config, err := ConfigFromEnvironment(func(string) string { return "" })
	if err != nil || config.Namespace == "" {
		t.Errorf("the namespace is %q: %v", config.Namespace, err)
	}
	config, err = ConfigFromEnvironment(func(name string) string { return map[string]string{"POD_NAMESPACE": "given"}[name] })
	if err != nil || config.Namespace != "given" {
		t.Errorf("the namespace is %q: %v", config.Namespace, err)
	}
}

// The rules for paths know each mount of the containers that pools are mounted in: two at one path make the DaemonSet invalid.
func TestRulesForPathsKnowMounts(t *testing.T) {
	content, err := os.ReadFile("../../../deploy/operator/hostpathprovisioner.kubevirt.io_hostpathprovisioners.yaml")
	must.Succeed(t, err)
	rules, err := yaml.YAMLToJSON(content)
	must.Succeed(t, err)
	objects := rendered(t, testConfig, allFacts, legacySpec())
	for _, c := range []corev1.Container{
		containerOf(t, driverSet(t, objects), driverContainer), containerOf(t, legacySet(t, objects), legacyContainer),
	} {
		for _, mount := range c.VolumeMounts {
			known := strings.Contains(string(rules), "'"+mount.MountPath+"'")
			for d := mount.MountPath; d != "/"; d = path.Dir(d) {
				known = known || strings.Contains(string(rules), "'"+d+"/'")
			}
			if !known && mount.MountPath != string(legacySpec().PathConfig.Path) {
				t.Errorf("a pool can be at %s, where the container %s has a mount", mount.MountPath, c.Name)
			}
		}
	}
}

// Users of the upstream operator select its rules, monitors and Services by this label.
func TestMonitoringHasTheUpstreamLabel(t *testing.T) {
	found := 0
	for name, object := range rendered(t, testConfig, allFacts, onePoolSpec()) {
		kind, of, _ := strings.Cut(name, " ")
		switch {
		case slices.Contains([]string{"PrometheusRule", "ServiceMonitor", "Service"}, kind), strings.HasSuffix(of, monitoringRole):
			if found++; object.GetLabels()[metricsLabel] != "true" {
				t.Errorf("%s has the labels %v", name, object.GetLabels())
			}
		}
	}
	if found < 5 {
		t.Errorf("there are %d such objects", found)
	}
}

// Each monitor selects one of the Services, by labels that the operator does not change, and a port of it.
func TestMonitorsSelectServices(t *testing.T) {
	objects := rendered(t, testConfig, allFacts, onePoolSpec())
	for monitor, want := range map[string]string{serviceMonitor: MetricsService, operatorMonitor: "hostpath-provisioner-operator-metrics"} {
		spec := objects["ServiceMonitor "+monitor].Object["spec"].(map[string]any)
		selected, _, err := unstructured.NestedStringMap(spec, "selector", "matchLabels")
		must.Succeed(t, err)
		port := spec["endpoints"].([]any)[0].(map[string]any)["port"]
		var got []string
		for name, object := range objects {
			kind, of, _ := strings.Cut(name, " ")
			if kind == "Service" && len(selected) > 0 && labels.SelectorFromSet(selected).Matches(labels.Set(object.GetLabels())) {
				got = append(got, of)
				ports, _, err := unstructured.NestedSlice(object.Object, "spec", "ports")
				must.Succeed(t, err)
				if ports[0].(map[string]any)["name"] != port {
					t.Errorf("%s has the ports %v, want %v", of, ports, port)
				}
			}
		}
		if diff := cmp.Diff([]string{want}, got); diff != "" {
			t.Errorf("%s selects other Services (-want +got):\n%s", monitor, diff)
		}
	}
}
