package deploy_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

const (
	devicesDir       = "../../deploy/devices"
	devicesNamespace = "local-pv-provisioner"
)

func TestDevicesObjects(t *testing.T) {
	for _, dir := range []string{devicesDir, devicesDir + "/monitoring", devicesDir + "/openshift"} {
		for _, o := range manifest.Render(t, dir) {
			k, ok := kinds[o.APIVersion+" "+o.Kind]
			if !ok {
				t.Fatalf("%s of %s is not expected here", o.Kind, o.APIVersion)
			}
			if err := k.decode(o.YAML); err != nil {
				t.Errorf("%s: %v", o, err)
			}
			if k.namespaced && o.Namespace != devicesNamespace {
				t.Errorf("%s is in namespace %q", o, o.Namespace)
			}
		}
	}
	objs := manifest.Render(t, devicesDir)
	ns := manifest.Only[corev1.Namespace](t, objs, "Namespace")
	if ns.Name != devicesNamespace || ns.Labels["pod-security.kubernetes.io/enforce"] != "privileged" {
		t.Errorf("the namespace is %s with the labels %v", ns.Name, ns.Labels)
	}
	class := manifest.Only[storagev1.StorageClass](t, objs, "StorageClass")
	if class.Provisioner != "kubernetes.io/no-provisioner" || ptr(class.VolumeBindingMode) != storagev1.VolumeBindingWaitForFirstConsumer {
		t.Errorf("class %s has the provisioner %s and binds %s", class.Name, class.Provisioner, ptr(class.VolumeBindingMode))
	}
}

// The whole of what the agent asks for, and nothing that it does not. The cases of the cluster show that it suffices.
func TestDevicesRBAC(t *testing.T) {
	objs := manifest.Render(t, devicesDir)
	want := map[right]bool{}
	add := func(clusterWide bool, resource string, verbs ...string) {
		for _, v := range verbs {
			want[right{resource, v, clusterWide}] = true
		}
	}
	add(true, "nodes", "list", "watch")
	add(true, "persistentvolumes", "create", "delete", "list", "patch", "watch")
	add(true, "events.events.k8s.io", "create", "patch")
	add(false, "configmaps", "list", "watch")
	add(false, "leases.coordination.k8s.io", "create", "delete", "get")
	if diff := cmp.Diff(want, rights(t, objs), cmp.AllowUnexported(right{})); diff != "" {
		t.Errorf("(- want, + got):\n%s", diff)
	}
	sa := manifest.Only[corev1.ServiceAccount](t, objs, "ServiceAccount")
	for _, b := range bindings(t, objs) {
		if len(b.subjects) != 1 || b.subjects[0].Name != sa.Name || b.subjects[0].Namespace != devicesNamespace {
			t.Errorf("%s is for %v", b.name, b.subjects)
		}
	}
	if got := daemonSet(t, objs).Spec.Template.Spec.ServiceAccountName; got != sa.Name {
		t.Errorf("the pod runs as %q", got)
	}
}

// kubelet asks a registry for latest each time, and gets another program some day.
func TestDevicesImageHasVersion(t *testing.T) {
	for _, dir := range []string{devicesDir, devicesDir + "/openshift"} {
		c := container(t, daemonSet(t, manifest.Render(t, dir)).Spec.Template.Spec, "provisioner")
		if _, tag, _ := strings.Cut(c.Image, ":"); tag == "" || tag == "latest" {
			t.Errorf("%s has the image %s", dir, c.Image)
		}
	}
}

// Privileged it has to be, for the devices: the program itself drops what it does not need. The rest is closed.
func TestDevicesContainerPrivileges(t *testing.T) {
	pod := daemonSet(t, manifest.Render(t, devicesDir)).Spec.Template.Spec
	if len(pod.Containers)+len(pod.InitContainers) != 1 {
		t.Fatalf("the pod has the containers %v and %v", pod.Containers, pod.InitContainers)
	}
	c := container(t, pod, "provisioner")
	wantContext := &corev1.SecurityContext{Privileged: new(true), ReadOnlyRootFilesystem: new(true)}
	if diff := cmp.Diff(wantContext, c.SecurityContext); diff != "" {
		t.Errorf("security context (- want, + got):\n%s", diff)
	}
	if pod.HostNetwork || pod.HostIPC || !pod.HostPID {
		t.Errorf("host network %t, IPC %t, PID %t; want only PID", pod.HostNetwork, pod.HostIPC, pod.HostPID)
	}
	wantMounts := []corev1.VolumeMount{
		{Name: "dev", MountPath: "/dev", ReadOnly: true},
		{Name: "records", MountPath: "/var/lib/local-pv-provisioner"},
	}
	if diff := cmp.Diff(wantMounts, c.VolumeMounts); diff != "" {
		t.Errorf("mounts (- want, + got):\n%s", diff)
	}
	for _, m := range c.VolumeMounts {
		if v, _ := volume(pod, m.Name); v.HostPath == nil || v.HostPath.Path != m.MountPath {
			t.Errorf("%s is not at its path on the host, which PersistentVolumes and records name", m.Name)
		}
	}
	if c.LivenessProbe == nil || c.ReadinessProbe == nil || c.ReadinessProbe.HTTPGet.Path != "/readyz" || len(c.Resources.Requests) != 2 {
		t.Error("a probe or a request is missing")
	}
	if !slices.Contains(pod.Tolerations, corev1.Toleration{Operator: corev1.TolerationOpExists}) {
		t.Error("tainted nodes have no agent")
	}
}

// The constraints allow what the pod asks for, to the agent alone, and no more.
func TestDevicesOnOpenShift(t *testing.T) {
	objs := manifest.Render(t, devicesDir+"/openshift")
	scc := manifest.Only[securityContextConstraints](t, objs, "SecurityContextConstraints")
	pod := daemonSet(t, objs).Spec.Template.Spec
	allowed := []bool{scc.AllowPrivilegedContainer, scc.ReadOnlyRootFilesystem, scc.AllowHostPID, scc.AllowHostNetwork, scc.AllowHostIPC, scc.AllowHostPorts}
	c := container(t, pod, "provisioner")
	asked := []bool{ptr(c.SecurityContext.Privileged), ptr(c.SecurityContext.ReadOnlyRootFilesystem), pod.HostPID, pod.HostNetwork, pod.HostIPC, false}
	if diff := cmp.Diff(asked, allowed); diff != "" {
		t.Errorf("privileged, read-only, PID, network, IPC, ports (- asked for, + allowed):\n%s", diff)
	}
	if n := len(scc.AllowedCapabilities) + len(scc.DefaultAddCapabilities) + len(scc.Users) + len(scc.Groups) + len(scc.SeccompProfiles); n > 0 {
		t.Errorf("the constraints allow more: %+v", scc)
	}
	if scc.RunAsUser.Type != "RunAsAny" || scc.SELinuxContext.Type != "RunAsAny" || scc.FSGroup.Type == "" || scc.SupplementalGroups.Type == "" {
		t.Errorf("the constraints leave something out: %+v", scc)
	}
	// Of its own the pod has directories of the host, and the token is projected into it.
	if diff := cmp.Diff([]string{"hostPath", "projected"}, scc.Volumes); diff != "" {
		t.Errorf("volumes (- want, + got):\n%s", diff)
	}
	want := []rbacv1.PolicyRule{{APIGroups: []string{"security.openshift.io"}, Resources: []string{"securitycontextconstraints"},
		ResourceNames: []string{scc.Name}, Verbs: []string{"use"}}}
	if diff := cmp.Diff(want, roles(t, objs)["Role local-pv-provisioner-scc"]); diff != "" {
		t.Errorf("(- want, + got):\n%s", diff)
	}
	plain := map[string]string{}
	for _, o := range manifest.Render(t, devicesDir) {
		plain[o.String()] = string(o.YAML)
	}
	added := 0
	for _, o := range objs {
		was, ok := plain[o.String()]
		if !ok {
			added++
		} else if was != string(o.YAML) {
			t.Errorf("%s differs on OpenShift", o)
		}
		delete(plain, o.String())
	}
	if added != 3 || len(plain) > 0 {
		t.Errorf("%d objects are added, want the constraints, a role and its binding; missing: %v", added, plain)
	}
}

func TestDevicesMonitor(t *testing.T) {
	objs := manifest.Render(t, devicesDir)
	svc := manifest.Only[corev1.Service](t, objs, "Service")
	monitor := manifest.Only[monitoringv1.ServiceMonitor](t, manifest.Render(t, devicesDir+"/monitoring"), "ServiceMonitor")
	if !matches(monitor.Spec.Selector.MatchLabels, svc.Labels) || monitor.Namespace != svc.Namespace {
		t.Errorf("the monitor selects %v in %s, the service has %v in %s", monitor.Spec.Selector, monitor.Namespace, svc.Labels, svc.Namespace)
	}
	if !matches(svc.Spec.Selector, daemonSet(t, objs).Spec.Template.Labels) {
		t.Errorf("the service selects %v", svc.Spec.Selector)
	}
	if got := svc.Labels[monitor.Spec.JobLabel]; got != "local-pv-provisioner" {
		t.Errorf("the label job will be %q", got)
	}
	endpoint := monitor.Spec.Endpoints[0]
	if endpoint.Port != svc.Spec.Ports[0].Name || !endpoint.HonorLabels {
		t.Errorf("the endpoint is %+v", endpoint)
	}
	if r := endpoint.RelabelConfigs[0]; r.TargetLabel != "node" || r.SourceLabels[0] != "__meta_kubernetes_pod_node_name" {
		t.Errorf("targets are not named by their node: %+v", r)
	}
}
