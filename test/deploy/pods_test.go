package deploy_test

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

// An access is what a container may do. The rest is closed: each has a read-only root filesystem, drops all capabilities, gains none,
// and is filtered by the runtime's seccomp profile.
type access struct {
	privileged   bool
	capabilities string
	token        bool     // of the service account, where not all containers have it
	host         []string // its directories, with a ! if it may write there
}

const socketDir = "/var/lib/kubelet/plugins/" + driverName

var (
	sidecar = access{host: []string{socketDir}}
	calling = access{host: []string{socketDir}, token: true}
)

// provisioning is what the provisioners from before CSI may do in a directory.
func provisioning(pool, state string) access {
	return access{capabilities: "DAC_OVERRIDE FOWNER LINUX_IMMUTABLE SYS_ADMIN", host: []string{"/dev", "/sys/fs!", pool + "!", state + "!"}}
}

// programs are what users install, with the components that have containers, and what their containers may do.
var programs = []struct {
	dir, components string
	hostPID         bool
	containers      map[string]access
}{
	{"csi", "components: [$csi/snapshots, $csi/freeze]", false, map[string]access{
		"driver": {privileged: true, host: []string{socketDir + "!", "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices!",
			"/var/lib/kubelet/pods!", "/var/hpvolumes!", "/sys/fs!", "/dev"}},
		"csi-provisioner": calling, "csi-resizer": calling, "csi-snapshotter": calling, "health-monitor": calling, "livenessprobe": sidecar,
		"node-driver-registrar": {host: []string{socketDir, "/var/lib/kubelet/plugins_registry!"}},
		"freezer":               {host: []string{socketDir + "!", "/sys/fs/cgroup!"}},
	}},
	{"devices", "", true, map[string]access{
		"provisioner": {privileged: true, host: []string{"/dev", "/var/lib/local-pv-provisioner!"}},
	}},
	{"provisioner", "", false, map[string]access{"provisioner": provisioning("/var/hpvolumes", "/var/lib/hostpath-provisioner-state")}},
	{"single-node", "", false, map[string]access{"provisioner": provisioning("/var/kubernetes", "/var/lib/hostpath-single-node-state")}},
	{"migrate", "", false, map[string]access{
		"migrate": {capabilities: "DAC_OVERRIDE", host: []string{"/", socketDir, "/var/hpvolumes!", "/var/lib/hostpath-migrate!"}},
	}},
}

// podOf is the pod of a DaemonSet, or of a Deployment of which never two run at once.
func podOf(t *testing.T, objs manifest.Objects) corev1.PodSpec {
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

// container is the container of that name.
func container(t *testing.T, pod corev1.PodSpec, name string) corev1.Container {
	t.Helper()
	i := slices.IndexFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("the pod has no container %q", name)
	}
	return pod.Containers[i]
}

// argsOf are the flags that a container is started with, by name. A flag
// without a value is "true".
func argsOf(c corev1.Container) map[string]string {
	args := map[string]string{}
	for _, a := range c.Args {
		name, value, ok := strings.Cut(strings.TrimPrefix(a, "--"), "=")
		if !ok {
			value = "true"
		}
		args[name] = value
	}
	return args
}

func volume(pod corev1.PodSpec, name string) corev1.Volume {
	i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	return pod.Volumes[i]
}

// The cluster of the tests has the sidecars that users get, as far as they are Go modules.
func TestSidecarsAreThoseOfTestCluster(t *testing.T) {
	modules, err := os.ReadFile("../cluster/kubernetes/go.mod")
	succeed(t, err)
	pod := podOf(t, overlay(t, map[string]string{"kustomization.yaml": "resources: [$csi]\ncomponents: [$csi/snapshots]"}))
	for name, module := range map[string]string{
		"csi-provisioner": "external-provisioner/v6", "csi-resizer": "external-resizer/v2", "csi-snapshotter": "external-snapshotter/v8",
	} {
		_, version, _ := strings.Cut(container(t, pod, name).Image, ":")
		version, _, _ = strings.Cut(version, "@")
		if want := "github.com/kubernetes-csi/" + module + " " + version + " "; !strings.Contains(string(modules), want) {
			t.Errorf("test/cluster/kubernetes/go.mod does not have %s", want)
		}
	}
}

func TestContainerSpecs(t *testing.T) {
	for _, p := range programs {
		objs := manifest.Render(t, deployDir+p.dir)
		if p.components != "" {
			objs = overlay(t, map[string]string{"kustomization.yaml": "resources: [$csi]\n" + p.components})
		}
		pod := podOf(t, objs)
		if pod.HostNetwork || pod.HostIPC || pod.HostPID != p.hostPID || len(pod.InitContainers) > 0 || len(pod.Containers) != len(p.containers) {
			t.Errorf("%s: network %t, IPC %t, PID %t, the containers %d and %d", p.dir, pod.HostNetwork, pod.HostIPC, pod.HostPID, len(pod.InitContainers), len(pod.Containers))
		}
		for _, c := range pod.Containers {
			t.Run(p.dir+" "+c.Name, func(t *testing.T) {
				want, ok := p.containers[c.Name]
				if slices.Sort(want.host); !ok {
					t.Fatal("it is not expected here")
				}
				if diff := cmp.Diff(want, accessOf(t, pod, c), cmp.AllowUnexported(access{})); diff != "" {
					t.Errorf("(- want, + got):\n%s", diff)
				}
				wantOrderly(t, c)
			})
		}
	}
}

// accessOf is what a container may do. An error is what none may.
func accessOf(t *testing.T, pod corev1.PodSpec, c corev1.Container) (a access) {
	t.Helper()
	s := ptr(c.SecurityContext)
	if a.privileged = ptr(s.Privileged); !a.privileged {
		if s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || !slices.Equal(ptr(s.Capabilities).Drop, []corev1.Capability{"ALL"}) ||
			ptr(s.SeccompProfile).Type != corev1.SeccompProfileTypeRuntimeDefault {
			t.Errorf("it may gain privileges, keeps capabilities, or may make any system call: %+v", s)
		}
	}
	if !ptr(s.ReadOnlyRootFilesystem) {
		t.Error("the root filesystem can be written to")
	}
	var added []string
	for _, capability := range ptr(s.Capabilities).Add {
		added = append(added, string(capability))
	}
	a.capabilities = strings.Join(added, " ")
	for _, m := range c.VolumeMounts {
		v := volume(pod, m.Name)
		if v.HostPath != nil {
			path := v.HostPath.Path
			if !m.ReadOnly {
				path += "!"
			}
			a.host = append(a.host, path)
		}
		for _, source := range ptr(v.Projected).Sources {
			a.token = a.token || source.ServiceAccountToken != nil
		}
	}
	slices.Sort(a.host)
	return a
}

var pinned = regexp.MustCompile(`^[a-z0-9.-]+(/[a-z0-9._-]+)+:v?[0-9]+\.[0-9]+\.[0-9]+(-[a-z0-9.]+)?(@sha256:[0-9a-f]{64})?$`)

// kubelet asks a registry for latest each time, and gets another program some day.
func wantOrderly(t *testing.T, c corev1.Container) {
	t.Helper()
	if !pinned.MatchString(c.Image) {
		t.Errorf("image %q is not pinned to a version", c.Image)
	}
	if cpu, memory := c.Resources.Requests.Cpu(), c.Resources.Requests.Memory(); cpu.Sign() <= 0 || memory.Sign() <= 0 {
		t.Errorf("no CPU or memory is requested: %v", c.Resources)
	}
}

func driverPod(t *testing.T) corev1.PodSpec {
	t.Helper()
	return podOf(t, manifest.Render(t, csiDir))
}

// Stand-ins run in the cluster in place of these programs: an unknown flag would keep them from starting.
func TestFlagsOfSidecarsExist(t *testing.T) {
	pod := driverPod(t)
	for name, known := range map[string][]string{
		"node-driver-registrar": {"csi-address", "kubelet-registration-path", "plugin-registration-path", "http-endpoint", "timeout", "v"},
		"livenessprobe":         {"csi-address", "http-endpoint", "probe-timeout", "metrics-path", "v"},
		// With leader-election it would hear of the volumes of its own node, and none of the others; with enable-node-watcher each node would
		// watch all pods.
		"health-monitor": {"csi-address", "list-volumes-interval", "timeout", "http-endpoint", "v"},
	} {
		for flag := range argsOf(container(t, pod, name)) {
			if !slices.Contains(known, flag) {
				t.Errorf("%s has --%s", name, flag)
			}
		}
	}
}

// What a small cluster does not show.
func TestFlagsForLargeClusters(t *testing.T) {
	pod := driverPod(t)
	for name, want := range map[string]map[string]string{
		// The timeout is the driver's own bound: what ends before that is undone.
		"csi-provisioner": {"timeout": "2m", "kube-api-qps": "100", "kube-api-burst": "200"},
		"csi-resizer":     {"handle-volume-inuse-error": "false"},
	} {
		args := argsOf(container(t, pod, name))
		for flag, value := range want {
			if args[flag] != value {
				t.Errorf("%s: --%s=%s, want %s", name, flag, args[flag], value)
			}
		}
	}
	seconds := func(name, flag string) time.Duration {
		d, err := time.ParseDuration(argsOf(container(t, pod, name))[flag])
		if err != nil {
			t.Fatalf("--%s: %v", flag, err)
		}
		return d
	}
	retry, renew, lease := seconds("csi-resizer", "leader-election-retry-period"), seconds("csi-resizer", "leader-election-renew-deadline"), seconds("csi-resizer", "leader-election-lease-duration")
	// Each node asks for the lease once in the retry period; client-go waits up to 1.2 times as long, and does not start if that is too long.
	// No volume grows before a lost leader's lease has ended.
	if retry < 20*time.Second || renew <= retry*12/10 || lease <= renew || lease > 2*time.Minute {
		t.Errorf("the lease lasts %s, is given up after %s and tried for every %s", lease, renew, retry)
	}
	if interval := seconds("health-monitor", "list-volumes-interval"); interval < time.Minute {
		t.Errorf("the health monitor lists the volumes every %s", interval)
	}
	probe := ptr(container(t, pod, "driver").LivenessProbe)
	if patience := time.Duration(probe.PeriodSeconds*probe.FailureThreshold) * time.Second; patience < time.Minute {
		t.Errorf("the driver is restarted after %s without an answer", patience)
	}
	if inner, outer := seconds("livenessprobe", "probe-timeout"), time.Duration(probe.TimeoutSeconds)*time.Second; inner >= outer {
		t.Errorf("kubelet waits %s for a sidecar that waits %s for the driver", outer, inner)
	}
}

// A directory of kubelet that is made by a pod would hide a wrong path.
func TestOnlyOwnHostPathsAreCreated(t *testing.T) {
	// Kubelet makes the last with the first block volume of the node.
	ours := []string{socketDir, "/var/hpvolumes", "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices"}
	for _, v := range driverPod(t).Volumes {
		if v.HostPath != nil && (ptr(v.HostPath.Type) == corev1.HostPathDirectoryOrCreate) != slices.Contains(ours, v.HostPath.Path) {
			t.Errorf("%s has type %q", v.HostPath.Path, ptr(v.HostPath.Type))
		}
	}
}

// Of a read-only root, as in OpenShift, Flatcar and Talos, /var can be written to.
func TestHostPathsAreMadeBelowVarOnly(t *testing.T) {
	made := 0
	for _, p := range programs {
		for _, v := range podOf(t, manifest.Render(t, deployDir+p.dir)).Volumes {
			if v.HostPath == nil || ptr(v.HostPath.Type) != corev1.HostPathDirectoryOrCreate {
				continue
			}
			made++
			if !strings.HasPrefix(v.HostPath.Path, "/var/") {
				t.Errorf("%s makes %s", p.dir, v.HostPath.Path)
			}
		}
	}
	if made < len(programs) {
		t.Errorf("%d directories are made by %d programs", made, len(programs))
	}
}

// Programs that serve directories see each other by the host's null device, and not by a container's own.
func TestProvisionersHaveTheDevicesOfTheHost(t *testing.T) {
	for _, dir := range []string{"provisioner", "single-node"} {
		c := podOf(t, manifest.Render(t, deployDir+dir)).Containers[0]
		if !slices.Contains(c.Args, "--device-nodes=/host/dev") || !slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/host/dev" && m.Name == "dev" }) {
			t.Errorf("the host's /dev is not used: %v", c.Args)
		}
	}
}

func TestHealthMonitorIsOptional(t *testing.T) {
	const health = "health-monitor"
	for _, resource := range []string{"", "/openshift"} {
		want := byName(manifest.Render(t, csiDir+resource))
		got := byName(overlay(t, map[string]string{"kustomization.yaml": "resources: [$csi" + resource + "]\ncomponents: [$csi/without-health-monitor]\n"}))
		for name := range want {
			if _, kept := got[name]; kept == strings.HasSuffix(name, "-"+health) {
				t.Errorf("%s is there: %t", name, kept)
			}
		}
		if set := got["DaemonSet hostpath-csi-driver"]; strings.Contains(set, health) || strings.Count(set, "image:") != strings.Count(want["DaemonSet hostpath-csi-driver"], "image:")-1 {
			t.Errorf("the containers are those of\n%s", set)
		}
	}
}

func TestPoolChangeRollsDaemonSet(t *testing.T) {
	after := podOf(t, overlay(t, map[string]string{
		"kustomization.yaml": "resources: [$csi]\nconfigMapGenerator:\n- {name: hostpath-csi-pools, behavior: replace, files: [pools.json]}\n",
		"pools.json":         `[{"name":"local","path":"/var/hpvolumes","reserve":"10%"}]`,
	}))
	if reflect.DeepEqual(driverPod(t), after) {
		t.Error("the pod is the same, and would keep its old pools")
	}
}

// The cases of the cluster show the rest of the CSIDriver.
func TestCSIDriverWithoutSELinuxMount(t *testing.T) {
	spec := manifest.Only[storagev1.CSIDriver](t, manifest.Render(t, csiDir), "CSIDriver").Spec
	// A bind mount has the context of its filesystem, and nothing counts the volumes of a node.
	if ptr(spec.SELinuxMount) || spec.NodeAllocatableUpdatePeriodSeconds != nil || ptr(spec.RequiresRepublish) || len(spec.TokenRequests) > 0 {
		t.Errorf("%+v", spec)
	}
}

// Users of the earlier single-node provisioner have its class as the default, and no other.
func TestDefaultClass(t *testing.T) {
	for _, p := range programs {
		for _, class := range manifest.All[storagev1.StorageClass](t, manifest.Render(t, deployDir+p.dir), "StorageClass") {
			name := fmt.Sprint(class.Name, " ", ptr(class.VolumeBindingMode))
			if isDefault := class.Annotations["storageclass.kubernetes.io/is-default-class"] == "true"; isDefault != (name == "hostpath Immediate") {
				t.Errorf("%s is the default: %t", name, isDefault)
			}
		}
	}
}

// The examples show that a volume needs nothing of a pod: neither root, but for a device, nor an fsGroup, nor a namespace that admits more
// than others do.
func TestExamplePodsAreRestricted(t *testing.T) {
	for dir, block := range map[string]bool{"csi/example": false, "csi/example/block": true} {
		pod := manifest.Only[corev1.Pod](t, manifest.Render(t, deployDir+dir), "Pod").Spec
		s := ptr(pod.SecurityContext)
		if ptr(s.RunAsNonRoot) == block || s.FSGroup != nil {
			t.Errorf("%s: the security context is %+v", dir, s)
		}
		for _, c := range pod.Containers {
			if c.SecurityContext.SeccompProfile == nil {
				c.SecurityContext.SeccompProfile = s.SeccompProfile
			}
			if a := accessOf(t, pod, c); !cmp.Equal(a, access{}, cmp.AllowUnexported(access{})) {
				t.Errorf("%s: the container %s has %+v", dir, c.Name, a)
			}
			wantOrderly(t, c)
		}
	}
}
