package deploy_test

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"net"
	"net/url"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

const (
	driver      = "driver"
	provisioner = "csi-provisioner"
	resizer     = "csi-resizer"
	registrar   = "node-driver-registrar"
	liveness    = "livenessprobe"
	health      = "health-monitor"
	// blockTargets is where kubelet has block volumes published.
	blockTargets = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices"
	socketOnHost = "/var/lib/kubelet/plugins/" + driverName + "/csi.sock"
)

// flags are the flags that each program has and that may be of use here. An
// unknown flag would keep its container from starting. Those of the driver are in the
// table that its own test compares with the program.
var flags = map[string][]string{
	driver: documentedFlags(),
	provisioner: {
		"csi-address", "node-deployment", "node-deployment-immediate-binding", "strict-topology",
		"immediate-topology", "enable-capacity", "capacity-ownerref-level", "capacity-poll-interval",
		"extra-create-metadata", "kube-api-qps", "kube-api-burst", "timeout", "http-endpoint", "v",
	},
	resizer: {
		"csi-address", "leader-election", "leader-election-namespace", "leader-election-labels",
		"leader-election-lease-duration", "leader-election-renew-deadline", "leader-election-retry-period",
		"handle-volume-inuse-error", "workers", "resync-period", "retry-interval-start", "retry-interval-max",
		"kube-api-qps", "kube-api-burst", "timeout", "http-endpoint", "metrics-path", "feature-gates", "v",
	},
	registrar: {"csi-address", "kubelet-registration-path", "plugin-registration-path", "http-endpoint", "timeout", "v"},
	liveness:  {"csi-address", "http-endpoint", "probe-timeout", "metrics-path", "v"},
	health: {
		"csi-address", "list-volumes-interval", "timeout", "http-endpoint", "v",
		"leader-election", "enable-node-watcher",
	},
}

var documentedFlag = regexp.MustCompile("`--([a-z-]+)`")

func documentedFlags() []string {
	page, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		panic(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## Flags\n")
	table, _, _ := strings.Cut(section, "\n## ")
	var names []string
	for line := range strings.Lines(table) {
		row, isRow := strings.CutPrefix(line, "|")
		if !isRow {
			continue
		}
		first, _, _ := strings.Cut(row, "|")
		for _, m := range documentedFlag.FindAllStringSubmatch(first, -1) {
			names = append(names, m[1])
		}
	}
	return names
}

// hostDirs are the directories of the host that each container may see, and
// whether it may write there.
var hostDirs = map[string]map[string]bool{
	driver: {
		path.Dir(socketOnHost):  true,
		"/var/lib/kubelet/pods": true,
		"/var/hpvolumes":        true,
		"/sys/fs":               true,
		"/dev":                  false,
		blockTargets:            true,
	},
	provisioner: {path.Dir(socketOnHost): false},
	resizer:     {path.Dir(socketOnHost): false},
	registrar:   {path.Dir(socketOnHost): false, "/var/lib/kubelet/plugins_registry": true},
	liveness:    {path.Dir(socketOnHost): false},
	health:      {path.Dir(socketOnHost): false},
}

func daemonSet(t *testing.T, objs manifest.Objects) appsv1.DaemonSet {
	t.Helper()
	return manifest.Only[appsv1.DaemonSet](t, objs, "DaemonSet")
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

// mountAt is the mount of a container that holds the given path.
func mountAt(c corev1.Container, p string) (corev1.VolumeMount, bool) {
	var best corev1.VolumeMount
	for _, m := range c.VolumeMounts {
		holds := p == m.MountPath || strings.HasPrefix(p, m.MountPath+"/")
		if holds && len(m.MountPath) > len(best.MountPath) {
			best = m
		}
	}
	return best, best.Name != ""
}

// onHost says what a path in a container is on the host.
func onHost(pod corev1.PodSpec, c corev1.Container, p string) (string, error) {
	m, ok := mountAt(c, p)
	if !ok {
		return "", fmt.Errorf("%s is not mounted in container %s", p, c.Name)
	}
	v, ok := volume(pod, m.Name)
	if !ok || v.HostPath == nil {
		return "", fmt.Errorf("%s in container %s is not a directory of the host", p, c.Name)
	}
	return path.Join(v.HostPath.Path, strings.TrimPrefix(p, m.MountPath)), nil
}

func volume(pod corev1.PodSpec, name string) (corev1.Volume, bool) {
	i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	if i < 0 {
		return corev1.Volume{}, false
	}
	return pod.Volumes[i], true
}

func TestContainerNames(t *testing.T) {
	pod := daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec
	var got []string
	for _, c := range pod.Containers {
		got = append(got, c.Name)
	}
	want := slices.Sorted(maps.Keys(flags))
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("the containers are %q, want %q", got, want)
	}
	if n := len(pod.InitContainers); n != 0 {
		t.Errorf("the pod has %d init containers, of which nothing is checked here", n)
	}
}

func TestContainerSpecs(t *testing.T) {
	pod := daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec
	tests := []struct {
		name  string
		check func(corev1.PodSpec, corev1.Container) error
	}{
		{"has an image with a tag that stays", imageIsPinned},
		{"has only flags that exist, and each once", flagsExist},
		{"has the variables that its flags name", variablesExist},
		{"has a volume for each mount, and no path twice", mountsExist},
		{"sees of the host what it needs", hostIsHidden},
		{"has a read-only root filesystem", rootIsReadOnly},
		{"is privileged if it is the driver, and else confined", privilegeIsTheDrivers},
		{"says what it needs of the node", requestsAreMade},
		{"has the API's token if it calls the API", tokenIsWhereItIsUsed},
		{"uses the driver's socket", socketIsTheDrivers},
	}
	for _, c := range pod.Containers {
		for _, tt := range tests {
			t.Run(c.Name+" "+tt.name, func(t *testing.T) {
				if err := tt.check(pod, c); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

var pinned = regexp.MustCompile(`^[a-z0-9.-]+(/[a-z0-9._-]+)+:v?[0-9]+\.[0-9]+\.[0-9]+(-[a-z0-9.]+)?$`)

func imageIsPinned(_ corev1.PodSpec, c corev1.Container) error {
	if !pinned.MatchString(c.Image) {
		return fmt.Errorf("image %q is not pinned to a version", c.Image)
	}
	return nil
}

func flagsExist(_ corev1.PodSpec, c corev1.Container) error {
	var errs []error
	if len(c.Command) != 0 {
		errs = append(errs, errors.New("the image's own command is replaced"))
	}
	if len(argsOf(c)) != len(c.Args) {
		errs = append(errs, fmt.Errorf("a flag is there twice: %q", c.Args))
	}
	for _, a := range c.Args {
		if !strings.HasPrefix(a, "--") {
			errs = append(errs, fmt.Errorf("%q is not a flag", a))
		}
	}
	for name := range argsOf(c) {
		if !slices.Contains(flags[c.Name], name) {
			errs = append(errs, fmt.Errorf("there is no flag --%s", name))
		}
	}
	return errors.Join(errs...)
}

var variable = regexp.MustCompile(`\$\(([^)]*)\)`)

func variablesExist(_ corev1.PodSpec, c corev1.Container) error {
	for _, m := range variable.FindAllStringSubmatch(strings.Join(c.Args, " "), -1) {
		if !slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == m[1] }) {
			return fmt.Errorf("%s is used and not set", m[1])
		}
	}
	return nil
}

func mountsExist(pod corev1.PodSpec, c corev1.Container) error {
	seen := map[string]bool{}
	for _, m := range c.VolumeMounts {
		if _, ok := volume(pod, m.Name); !ok {
			return fmt.Errorf("%s mounts the volume %q, which does not exist", m.MountPath, m.Name)
		}
		if seen[m.MountPath] {
			return fmt.Errorf("%s is mounted twice", m.MountPath)
		}
		seen[m.MountPath] = true
	}
	return nil
}

func hostIsHidden(pod corev1.PodSpec, c corev1.Container) error {
	for _, m := range c.VolumeMounts {
		v, _ := volume(pod, m.Name)
		if v.HostPath == nil {
			continue
		}
		mayWrite, maySee := hostDirs[c.Name][v.HostPath.Path]
		if !maySee {
			return fmt.Errorf("it sees %s of the host", v.HostPath.Path)
		}
		if m.ReadOnly == mayWrite {
			return fmt.Errorf("%s of the host: read-only is %t", v.HostPath.Path, m.ReadOnly)
		}
	}
	return nil
}

func rootIsReadOnly(_ corev1.PodSpec, c corev1.Container) error {
	if !ptr(ptr(c.SecurityContext).ReadOnlyRootFilesystem) {
		return errors.New("the root filesystem can be written to")
	}
	return nil
}

func privilegeIsTheDrivers(_ corev1.PodSpec, c corev1.Container) error {
	s := ptr(c.SecurityContext)
	if c.Name == driver {
		if !ptr(s.Privileged) {
			return errors.New("the driver is not privileged and cannot mount")
		}
		return nil
	}
	var errs []error
	if ptr(s.Privileged) {
		errs = append(errs, errors.New("it is privileged"))
	}
	if s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation {
		errs = append(errs, errors.New("it may gain privileges"))
	}
	if caps := ptr(s.Capabilities); len(caps.Add) != 0 || !slices.Contains(caps.Drop, "ALL") {
		errs = append(errs, errors.New("it keeps capabilities"))
	}
	if ptr(s.SeccompProfile).Type != corev1.SeccompProfileTypeRuntimeDefault {
		errs = append(errs, errors.New("it may make any system call"))
	}
	if s.RunAsUser == nil || *s.RunAsUser != 0 {
		errs = append(errs, errors.New("it is not root, and only root may use the socket"))
	}
	return errors.Join(errs...)
}

func requestsAreMade(_ corev1.PodSpec, c corev1.Container) error {
	for _, r := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
		if q := c.Resources.Requests[r]; q.Sign() <= 0 {
			return fmt.Errorf("no %s is requested", r)
		}
	}
	return nil
}

func tokenIsWhereItIsUsed(pod corev1.PodSpec, c corev1.Container) error {
	const inCluster = "/var/run/secrets/kubernetes.io/serviceaccount"
	var has []string
	for _, m := range c.VolumeMounts {
		v, _ := volume(pod, m.Name)
		if v.Projected == nil {
			continue
		}
		var files []string
		for _, s := range v.Projected.Sources {
			if s.ServiceAccountToken != nil {
				files = append(files, s.ServiceAccountToken.Path)
			}
			if ptr(s.ConfigMap).Name == "kube-root-ca.crt" {
				for _, item := range s.ConfigMap.Items {
					files = append(files, item.Path)
				}
			}
		}
		if slices.Contains(files, "token") && slices.Contains(files, "ca.crt") {
			has = append(has, m.MountPath)
		}
	}
	calls := c.Name == provisioner || c.Name == resizer || c.Name == health
	switch {
	case calls && !slices.Equal(has, []string{inCluster}):
		return fmt.Errorf("the token is at %q, and is searched for at %s", has, inCluster)
	case !calls && len(has) != 0:
		return fmt.Errorf("it has the token, at %q", has)
	}
	return nil
}

func socketIsTheDrivers(pod corev1.PodSpec, c corev1.Container) error {
	p := argsOf(c)["csi-address"]
	if c.Name == driver {
		endpoint, err := url.Parse(argsOf(c)["endpoint"])
		if err != nil {
			return err
		}
		if endpoint.Scheme != "unix" {
			return fmt.Errorf("%s is not a unix socket", endpoint)
		}
		p = endpoint.Path
	}
	got, err := onHost(pod, c, p)
	if err != nil {
		return err
	}
	if got != socketOnHost {
		return fmt.Errorf("the socket is %s on the host, want %s", got, socketOnHost)
	}
	return nil
}

func TestContainerFlags(t *testing.T) {
	pod := daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec
	for name, want := range map[string]map[string]string{
		driver: {
			"drivername": driverName,
			"nodeid":     "$(NODE_NAME)",
			"datadir":    "$(DATADIR)",
			// Each of these is the default of inspect, by its variable.
			"device-nodes": "$(DEVICE_NODES)",
			"state-dir":    "$(STATE_DIR)",
		},
		provisioner: {
			"node-deployment":                   "true",
			"node-deployment-immediate-binding": "true", // as the upstream driver has it
			"strict-topology":                   "true",
			"immediate-topology":                "false",
			"enable-capacity":                   "true",
			"capacity-ownerref-level":           "1",
			"extra-create-metadata":             "true",
			"timeout":                           "2m", // the driver's own bound; what ends before that is undone
			"kube-api-qps":                      "100",
			"kube-api-burst":                    "200",
		},
		resizer: {
			"leader-election":           "true",
			"leader-election-namespace": "$(NAMESPACE)",
			"handle-volume-inuse-error": "false",
		},
		registrar: {"kubelet-registration-path": socketOnHost},
	} {
		args := argsOf(container(t, pod, name))
		for flag, value := range want {
			if args[flag] != value {
				t.Errorf("%s: --%s=%s, want %s", name, flag, args[flag], value)
			}
		}
	}
}

func TestContainerEnvironment(t *testing.T) {
	pod := daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec
	for name, want := range map[string]map[string]string{
		driver:      {"NODE_NAME": "spec.nodeName"},
		provisioner: {"NODE_NAME": "spec.nodeName", "NAMESPACE": "metadata.namespace", "POD_NAME": "metadata.name"},
		resizer:     {"NAMESPACE": "metadata.namespace"},
	} {
		got := map[string]string{}
		for _, e := range container(t, pod, name).Env {
			got[e.Name] = ptr(ptr(e.ValueFrom).FieldRef).FieldPath
		}
		for env, field := range want {
			if got[env] != field {
				t.Errorf("%s: %s is the field %q, want %q", name, env, got[env], field)
			}
		}
	}
}

// The version is built in: what a kustomization makes of the image does not change it.
func TestDriverIsNotToldItsVersion(t *testing.T) {
	c := container(t, daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec, driver)
	if slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == "VERSION" }) || argsOf(c)["version"] != "" {
		t.Errorf("the driver is told its version: %v %v", c.Args, c.Env)
	}
}

// Kubelet names a target by its path on the host, and sees the mount there only
// if it is carried out of the container.
func TestTargetMountsPropagateToHost(t *testing.T) {
	const pods = "/var/lib/kubelet/pods"
	pod := daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec
	c := container(t, pod, driver)
	if got, err := onHost(pod, c, pods); err != nil || got != pods {
		t.Errorf("%s in the driver is %q on the host (%v)", pods, got, err)
	}
	m, _ := mountAt(c, pods)
	if got := ptr(m.MountPropagation); got != corev1.MountPropagationBidirectional {
		t.Errorf("the propagation of %s is %q", pods, got)
	}
}

// Only what is mounted recursively and keeps following the host has selinuxfs.
func TestDriverSeesHostSELinux(t *testing.T) {
	const selinuxfs = "/sys/fs/selinux"
	pod := daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec
	c := container(t, pod, driver)
	if got, err := onHost(pod, c, selinuxfs); err != nil || got != selinuxfs {
		t.Errorf("%s in the driver is %q on the host (%v)", selinuxfs, got, err)
	}
	m, _ := mountAt(c, selinuxfs)
	if got := ptr(m.MountPropagation); got != corev1.MountPropagationHostToContainer {
		t.Errorf("the propagation of %s is %q", m.MountPath, got)
	}
}

func TestRegistrationDirectory(t *testing.T) {
	pod := daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec
	got, err := onHost(pod, container(t, pod, registrar), "/registration")
	if want := "/var/lib/kubelet/plugins_registry"; err != nil || got != want {
		t.Errorf("the registration is at %q on the host (%v), want %q", got, err, want)
	}
}

// A directory of kubelet that is made by a pod would hide a wrong path.
func TestOnlyOwnHostPathsAreCreated(t *testing.T) {
	pod := daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec
	// Kubelet makes the last with the first block volume of the node.
	ours := []string{path.Dir(socketOnHost), "/var/hpvolumes", blockTargets}
	for _, v := range pod.Volumes {
		if v.HostPath == nil {
			continue
		}
		want := corev1.HostPathDirectory
		if slices.Contains(ours, v.HostPath.Path) {
			want = corev1.HostPathDirectoryOrCreate
		}
		if got := ptr(v.HostPath.Type); got != want {
			t.Errorf("%s has type %q, want %q", v.HostPath.Path, got, want)
		}
	}
}

func TestProbePortsAreServed(t *testing.T) {
	pod := daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec
	// Each probe is answered by the container on the right.
	for probed, answers := range map[string]string{driver: liveness, registrar: registrar} {
		t.Run(probed, func(t *testing.T) {
			probe := container(t, pod, probed).LivenessProbe
			if probe == nil || probe.HTTPGet == nil {
				t.Fatal("there is no HTTP probe")
			}
			if got, want := probe.HTTPGet.Path, "/healthz"; got != want {
				t.Errorf("the path is %s, want %s", got, want)
			}
			endpoint := argsOf(container(t, pod, answers))["http-endpoint"]
			if got, want := probe.HTTPGet.Port.IntValue(), port(t, endpoint); got != want {
				t.Errorf("the port is %d, and %s answers at %d", got, answers, want)
			}
		})
	}
}

func TestLivenessProbeToleratesSlowDriver(t *testing.T) {
	pod := daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec
	probe := ptr(container(t, pod, driver).LivenessProbe)
	patience := time.Duration(probe.PeriodSeconds*probe.FailureThreshold) * time.Second
	if patience < time.Minute {
		t.Errorf("the driver is restarted after %s without an answer", patience)
	}
	inner, err := time.ParseDuration(argsOf(container(t, pod, liveness))["probe-timeout"])
	if err != nil {
		t.Fatal(err)
	}
	if outer := time.Duration(probe.TimeoutSeconds) * time.Second; inner >= outer {
		t.Errorf("kubelet waits %s for a sidecar that waits %s for the driver", outer, inner)
	}
}

func TestHealthMonitorFlags(t *testing.T) {
	args := argsOf(container(t, daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec, health))
	interval, err := time.ParseDuration(args["list-volumes-interval"])
	if err != nil || interval < time.Minute {
		t.Errorf("it lists the volumes every %s (%v)", interval, err)
	}
	// A leader would hear of the volumes of its own node, and none of the others. The
	// watcher of nodes would have each node watch all pods.
	for _, flag := range []string{"leader-election", "enable-node-watcher"} {
		if value, given := args[flag]; given && value != "false" {
			t.Errorf("it has --%s=%s", flag, value)
		}
	}
}

func TestHealthMonitorIsOptional(t *testing.T) {
	for _, resource := range []string{"$csi", "$csi/openshift"} {
		t.Run(resource, func(t *testing.T) {
			with := manifest.Render(t, strings.Replace(resource, "$csi", csiDir, 1))
			without := overlay(t, map[string]string{"kustomization.yaml": `
resources: [` + resource + `]
components: [$csi/without-health-monitor]
`})
			wants := func(o manifest.Object) bool { return !strings.HasSuffix(o.Name, "-"+health) }
			if got, want := slices.Collect(named(without, nil)), slices.Collect(named(with, wants)); !slices.Equal(got, want) {
				t.Errorf("the objects are %q, want %q", got, want)
			}
			containers := func(objs manifest.Objects) (names []string) {
				for _, c := range daemonSet(t, objs).Spec.Template.Spec.Containers {
					names = append(names, c.Name)
				}
				return names
			}
			want := slices.DeleteFunc(containers(with), func(name string) bool { return name == health })
			if got := containers(without); !slices.Equal(got, want) {
				t.Errorf("the containers are %q, want %q", got, want)
			}
			for right := range rights(t, without) {
				if right.resource == "events" && right.verb != "create" && right.verb != "patch" {
					t.Errorf("there is still the right to %s events", right.verb)
				}
			}
		})
	}
}

// named are the names of objects, of those that are wanted.
func named(objs manifest.Objects, wanted func(manifest.Object) bool) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, o := range objs {
			if (wanted == nil || wanted(o)) && !yield(o.String()) {
				return
			}
		}
	}
}

// Each node asks for the lease once in the retry period or somewhat later.
func TestLeaderElectionRequestRate(t *testing.T) {
	args := argsOf(container(t, daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec, resizer))
	duration := func(flag string) time.Duration {
		d, err := time.ParseDuration(args[flag])
		if err != nil {
			t.Fatalf("--%s: %v", flag, err)
		}
		return d
	}
	retry := duration("leader-election-retry-period")
	renew := duration("leader-election-renew-deadline")
	lease := duration("leader-election-lease-duration")
	if retry < 20*time.Second {
		t.Errorf("every node asks for the lease every %s", retry)
	}
	// Else client-go does not start. It waits up to 1.2 times as long between tries.
	if renew <= retry*12/10 || lease <= renew {
		t.Errorf("the lease lasts %s, is given up after %s and tried for every %s", lease, renew, retry)
	}
	if lease > 2*time.Minute {
		t.Errorf("no volume grows for %s after a leader was lost", lease)
	}
}

func TestContainerPortsAreUnique(t *testing.T) {
	pod := daemonSet(t, manifest.Render(t, csiDir)).Spec.Template.Spec
	taken := map[int]string{}
	for _, c := range pod.Containers {
		for _, flag := range []string{"http-endpoint", "metrics-address"} {
			address, ok := argsOf(c)[flag]
			if !ok {
				continue
			}
			p := port(t, address)
			if other, ok := taken[p]; ok {
				t.Errorf("%s and %s both listen on %d", c.Name, other, p)
			}
			taken[p] = c.Name
		}
	}
	if len(taken) != 3 {
		t.Errorf("%d ports are listened on, want those of the metrics and of two probes", len(taken))
	}
}

func TestMetricsService(t *testing.T) {
	objs := manifest.Render(t, csiDir)
	ds := daemonSet(t, objs)
	c := container(t, ds.Spec.Template.Spec, driver)
	svc := manifest.Only[corev1.Service](t, objs, "Service")

	if svc.Spec.ClusterIP != corev1.ClusterIPNone {
		t.Errorf("the service has the address %q, want none", svc.Spec.ClusterIP)
	}
	if !matches(svc.Spec.Selector, ds.Spec.Template.Labels) {
		t.Errorf("the service selects %v, the pod is %v", svc.Spec.Selector, ds.Spec.Template.Labels)
	}
	if len(svc.Spec.Ports) != 1 {
		t.Fatalf("the service has %d ports, want 1", len(svc.Spec.Ports))
	}
	sp := svc.Spec.Ports[0]
	i := slices.IndexFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Name == sp.TargetPort.String() })
	if i < 0 {
		t.Fatalf("the driver has no port named %q", sp.TargetPort.String())
	}
	listens := port(t, argsOf(c)["metrics-address"])
	if sp.Name != "metrics" || int(sp.Port) != listens || int(c.Ports[i].ContainerPort) != listens {
		t.Errorf("service %s:%d, container %d, and the driver listens on %d",
			sp.Name, sp.Port, c.Ports[i].ContainerPort, listens)
	}
}

// matches says whether a selector that is not empty selects the labels.
func matches(selector, labels map[string]string) bool {
	for k, v := range selector {
		if labels[k] != v {
			return false
		}
	}
	return len(selector) > 0
}

// port is the port of an address that is bound on every interface.
func port(t *testing.T, address string) int {
	t.Helper()
	host, p, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	if host != "" {
		t.Errorf("%s is not bound on every interface", address)
	}
	n, err := strconv.Atoi(p)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// ptr is what p points to, or the zero value.
func ptr[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
