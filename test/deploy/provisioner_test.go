package deploy_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

// provisioners are the two forms of the provisioner from before CSI.
var provisioners = []struct {
	name, dir, namespace, path, class string
	rights                            map[string][]string
}{
	{"on each node", "../../deploy/provisioner", "kubevirt-hostpath-provisioner", "/var/hpvolumes", "hostpath-provisioner", map[string][]string{
		"persistentvolumes":             {"get", "list", "watch", "create", "patch", "delete"},
		"persistentvolumeclaims":        {"get", "list", "watch", "update"},
		"storageclasses.storage.k8s.io": {"get", "list", "watch"},
		"nodes":                         {"get"},
		"daemonsets.apps":               {"list"},
		"events":                        {"create", "patch"},
	}},
	{"single node", "../../deploy/single-node", "hostpath-provisioner-single-node", "/var/kubernetes", "hostpath", map[string][]string{
		"persistentvolumes":             {"get", "list", "watch", "create", "patch", "delete"},
		"persistentvolumeclaims":        {"get", "list", "watch"},
		"storageclasses.storage.k8s.io": {"get", "list", "watch"},
		"nodes":                         {"get", "list"},
		"events":                        {"create", "patch"},
	}},
}

// provisionerPod is the pod of a form.
func provisionerPod(t *testing.T, objs manifest.Objects) corev1.PodSpec {
	t.Helper()
	if sets := manifest.All[appsv1.DaemonSet](t, objs, "DaemonSet"); len(sets) == 1 {
		return sets[0].Spec.Template.Spec
	}
	deployment := manifest.Only[appsv1.Deployment](t, objs, "Deployment")
	if *deployment.Spec.Replicas != 1 || deployment.Spec.Strategy.Type != appsv1.RecreateDeploymentStrategyType {
		t.Errorf("two of %s can run at once", deployment.Name)
	}
	return deployment.Spec.Template.Spec
}

func TestProvisionerObjects(t *testing.T) {
	for _, p := range provisioners {
		t.Run(p.name, func(t *testing.T) {
			for _, dir := range []string{p.dir, p.dir + "/openshift", p.dir + "/example"} {
				for _, o := range manifest.Render(t, dir) {
					k, ok := kinds[o.APIVersion+" "+o.Kind]
					if !ok {
						t.Fatalf("%s of %s is not expected here", o.Kind, o.APIVersion)
					}
					if err := k.decode(o.YAML); err != nil {
						t.Error(err)
					}
					if k.namespaced && o.Namespace != p.namespace && !strings.HasSuffix(dir, "example") {
						t.Errorf("%s is in namespace %q", o, o.Namespace)
					}
				}
			}
			ns := manifest.Only[corev1.Namespace](t, manifest.Render(t, p.dir), "Namespace")
			if ns.Name != p.namespace || ns.Labels["pod-security.kubernetes.io/enforce"] != "privileged" {
				t.Errorf("the namespace is %s with the labels %v", ns.Name, ns.Labels)
			}
		})
	}
}

func TestProvisionerRBAC(t *testing.T) {
	for _, p := range provisioners {
		t.Run(p.name, func(t *testing.T) {
			objs := manifest.Render(t, p.dir)
			want := map[right]bool{}
			for resource, verbs := range p.rights {
				for _, verb := range verbs {
					want[right{resource, verb, true}] = true
				}
			}
			if diff := cmp.Diff(want, rights(t, objs), cmp.AllowUnexported(right{})); diff != "" {
				t.Errorf("(- want, + got):\n%s", diff)
			}
			sa := manifest.Only[corev1.ServiceAccount](t, objs, "ServiceAccount")
			for _, b := range bindings(t, manifest.Render(t, p.dir+"/openshift")) {
				if len(b.subjects) != 1 || b.subjects[0].Name != sa.Name || b.subjects[0].Namespace != p.namespace {
					t.Errorf("%s is for %v", b.name, b.subjects)
				}
			}
			if got := provisionerPod(t, objs).ServiceAccountName; got != sa.Name {
				t.Errorf("the pod runs as %q", got)
			}
		})
	}
}

func TestProvisionerContainerPrivileges(t *testing.T) {
	for _, p := range provisioners {
		t.Run(p.name, func(t *testing.T) {
			pod := provisionerPod(t, manifest.Render(t, p.dir))
			c := pod.Containers[0]
			s := c.SecurityContext
			want := corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"DAC_OVERRIDE", "FOWNER", "LINUX_IMMUTABLE", "SYS_ADMIN"}}
			if diff := cmp.Diff(&want, s.Capabilities); diff != "" {
				t.Errorf("capabilities (- want, + got):\n%s", diff)
			}
			if s.Privileged != nil || !ptr(s.ReadOnlyRootFilesystem) || ptr(s.AllowPrivilegeEscalation) || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
				t.Errorf("the security context is %+v", s)
			}
			if pod.HostNetwork || pod.HostPID || pod.HostIPC || len(pod.Containers) != 1 {
				t.Errorf("the pod is %+v", pod)
			}
			if c.LivenessProbe == nil || c.ReadinessProbe == nil || len(c.Resources.Requests) != 2 {
				t.Error("a probe or a request is missing")
			}
		})
	}
}

// PersistentVolumes say the path that the container sees.
func TestProvisionerMountsPoolAtHostPath(t *testing.T) {
	for _, p := range provisioners {
		t.Run(p.name, func(t *testing.T) {
			pod := provisionerPod(t, manifest.Render(t, p.dir))
			env := pod.Containers[0].Env
			if i := slices.IndexFunc(env, func(e corev1.EnvVar) bool { return e.Name == "PV_DIR" }); env[i].Value != p.path {
				t.Errorf("PV_DIR is %s", env[i].Value)
			}
			mounted := slices.ContainsFunc(pod.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool {
				return m.Name == "pool" && m.MountPath == p.path && *m.MountPropagation == corev1.MountPropagationHostToContainer
			})
			of := slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "pool" && v.HostPath.Path == p.path })
			if !mounted || !of {
				t.Errorf("%s of the host is not mounted there", p.path)
			}
		})
	}
}

// Programs that serve directories see each other by the host's null device, and not by a container's own.
func TestProvisionerHasTheDevicesOfTheHost(t *testing.T) {
	for _, p := range provisioners {
		t.Run(p.name, func(t *testing.T) {
			pod := provisionerPod(t, manifest.Render(t, p.dir))
			c := pod.Containers[0]
			mounted := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "dev" && m.MountPath == "/host/dev" && m.ReadOnly })
			of := slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "dev" && v.HostPath.Path == "/dev" })
			if !mounted || !of || !slices.Contains(c.Args, "--device-nodes=/host/dev") {
				t.Errorf("the host's /dev is not used: %v", c.Args)
			}
		})
	}
}

func TestProvisionerConstraintsAllowPodVolumes(t *testing.T) {
	for _, p := range provisioners {
		t.Run(p.name, func(t *testing.T) {
			objs := manifest.Render(t, p.dir+"/openshift")
			scc := manifest.Only[securityContextConstraints](t, objs, "SecurityContextConstraints")
			used := []string{"projected"} // the token
			for _, v := range provisionerPod(t, objs).Volumes {
				used = append(used, volumeType(t, v))
			}
			slices.Sort(used)
			if diff := cmp.Diff(slices.Compact(used), scc.Volumes); diff != "" {
				t.Errorf("(- used, + allowed):\n%s", diff)
			}
			if scc.AllowPrivilegedContainer || !scc.AllowHostDirVolumePlugin || len(scc.AllowedCapabilities) != 4 || len(scc.Users)+len(scc.Groups) != 0 {
				t.Errorf("%+v", scc)
			}
			if rules := roles(t, objs)["Role hostpath-provisioner-scc"]; len(rules) != 1 || !slices.Equal(rules[0].ResourceNames, []string{scc.Name}) {
				t.Errorf("the constraints that may be used: %v", rules)
			}
		})
	}
}

func TestProvisionerStorageClasses(t *testing.T) {
	modes := map[string]storagev1.VolumeBindingMode{
		"hostpath-provisioner":           storagev1.VolumeBindingWaitForFirstConsumer,
		"hostpath-provisioner-immediate": storagev1.VolumeBindingImmediate,
		"hostpath":                       storagev1.VolumeBindingImmediate,
	}
	for _, p := range provisioners {
		for _, class := range manifest.All[storagev1.StorageClass](t, manifest.Render(t, p.dir), "StorageClass") {
			if *class.VolumeBindingMode != modes[class.Name] {
				t.Errorf("%s binds %s", class.Name, *class.VolumeBindingMode)
			}
			isDefault := class.Annotations["storageclass.kubernetes.io/is-default-class"] == "true"
			if isDefault != (class.Name == "hostpath") {
				t.Errorf("%s is the default: %t", class.Name, isDefault)
			}
			deprecated := strings.HasPrefix(class.Annotations["kubernetes.io/description"], "Deprecated")
			if deprecated != (class.Name == "hostpath-provisioner-immediate") {
				t.Errorf("%s is deprecated: %t", class.Name, deprecated)
			}
		}
		claim := manifest.Only[corev1.PersistentVolumeClaim](t, manifest.Render(t, p.dir+"/example"), "PersistentVolumeClaim")
		pod := manifest.Only[corev1.Pod](t, manifest.Render(t, p.dir+"/example"), "Pod")
		if *claim.Spec.StorageClassName != p.class || pod.Spec.Volumes[0].PersistentVolumeClaim.ClaimName != claim.Name {
			t.Errorf("%s: the example uses class %s and claim %s", p.name, *claim.Spec.StorageClassName, pod.Spec.Volumes[0].PersistentVolumeClaim.ClaimName)
		}
	}
}

func TestProvisionerUnitRunsBeforeKubelet(t *testing.T) {
	unit, err := os.ReadFile("../../deploy/provisioner/host/hostpath-provisioner-selinux.service")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(unit), "\n")
	for _, want := range []string{"Type=oneshot", "RemainAfterExit=yes", "Before=kubelet.service", "RequiresMountsFor=/var/hpvolumes", "ConditionSecurity=selinux",
		"ExecStart=/usr/bin/chcon -t container_file_t /var/hpvolumes"} {
		if !slices.Contains(lines, want) {
			t.Errorf("%s is missing", want)
		}
	}
}

// For those who apply it by URL, as they did the manifests of the earlier provisioner.
func TestSingleNodeManifestIsCurrent(t *testing.T) {
	text, err := os.ReadFile("../../deploy/single-node/install.yaml")
	if err != nil {
		t.Fatal(err)
	}
	byName := func(objects manifest.Objects) map[string]string {
		all := map[string]string{}
		for _, o := range objects {
			all[o.String()] = strings.TrimSpace(string(o.YAML))
		}
		return all
	}
	if diff := cmp.Diff(byName(manifest.Render(t, "../../deploy/single-node")), byName(manifest.Parse(t, string(text)))); diff != "" {
		t.Errorf("run kubectl kustomize deploy/single-node > deploy/single-node/install.yaml (- want, + got):\n%s", diff)
	}
}
