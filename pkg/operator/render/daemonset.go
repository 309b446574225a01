package render

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/tlsprofile"
)

const (
	driverContainer      = "driver"
	provisionerContainer = "csi-provisioner"

	// capacityInterval is how often the capacity of pools is asked for when some are on claims. These are mounted when the driver
	// runs already, and until then have no capacity. With the default of a minute the first pods would wait that long. Only a
	// capacity that has changed is written.
	capacityInterval = "10s"
)

func (r *Renderer) driver() (*appsv1.DaemonSet, error) {
	set := r.daemonSet(&r.manifests.daemonSet, DriverDaemonSet, driverAccount, driverConstraints)
	set.Spec.Template.Labels[metricsLabel] = "true"
	pod := &set.Spec.Template.Spec
	i := slices.IndexFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == driverContainer })
	if i < 0 {
		return nil, errors.New("the manifests have no container " + driverContainer)
	}
	driver := &pod.Containers[i]
	removePool(pod, driver)
	if r.snapshotting() {
		r.manifests.snapshotter.to(pod)
	}
	if r.object.HasFeature(hppv1.Freezing) {
		r.manifests.freezer.to(pod)
	}
	driver = &pod.Containers[i]
	moveKubelet(pod, r.object.Spec.KubeletDirectory)
	addPools(pod, driver, r.pools)
	onClaims := slices.ContainsFunc(r.pools, func(p hppv1.StoragePool) bool { return p.PVCTemplate != nil })
	for i := range pod.Containers {
		if err := r.container(&pod.Containers[i]); err != nil {
			return nil, err
		}
		if onClaims && pod.Containers[i].Name == provisionerContainer {
			setArg(&pod.Containers[i], "--capacity-poll-interval", capacityInterval)
		}
	}
	return set, r.configure(driver)
}

// daemonSet is one of the manifests with names, labels and placement changed.
func (r *Renderer) daemonSet(from *appsv1.DaemonSet, name, account, constraints string) *appsv1.DaemonSet {
	set := from.DeepCopy()
	set.ObjectMeta = r.config.meta(name, set.Labels)
	template := &set.Spec.Template
	maps.Copy(template.Labels, r.config.labels())
	maps.Copy(template.Labels, set.Spec.Selector.MatchLabels)
	template.Labels[clusterServicesLabel] = "true"
	if r.facts.OpenShift {
		metav1.SetMetaDataAnnotation(&template.ObjectMeta, requiredConstraints, constraints)
	}
	template.Spec.ServiceAccountName = account
	place(&template.Spec, r.object.Spec)
	return set
}

func (r *Renderer) container(c *corev1.Container) error {
	var err error
	if c.Image, err = r.manifests.image(r.config, c.Image); err != nil {
		return err
	}
	c.ImagePullPolicy = r.object.Spec.ImagePullPolicy
	level := r.config.Verbosity
	if of := r.object.Spec.LogLevel; of != nil {
		level = int(*of)
	}
	if level >= 0 {
		setArg(c, "--v", strconv.Itoa(level))
	}
	resources := r.object.Spec.Resources.Sidecars
	if c.Name == driverContainer || c.Name == legacyContainer {
		resources = r.object.Spec.Resources.Driver
	}
	if resources != nil {
		c.Resources = *resources.DeepCopy()
	}
	return nil
}

func (r *Renderer) configure(driver *corev1.Container) error {
	data, err := dataDir(r.pools)
	if err != nil {
		return err
	}
	setVariable(driver, dataDirVariable, data)
	setVariable(driver, "SERVICE_NAME", MetricsService)
	r.metricsTLS(driver)
	return nil
}

// metricsTLS sets what the metrics of a container accept. Flags, and so new pods, are how the driver learns of another
// profile: it has no access to the API.
func (r *Renderer) metricsTLS(c *corev1.Container) {
	setArg(c, "--metrics-tls-version", tlsprofile.VersionName(r.facts.TLS.MinVersion))
	if suites := tlsprofile.SuiteNames(r.facts.TLS.CipherSuites); suites != "" {
		setArg(c, "--metrics-tls-cipher-suites", suites)
	}
}

// place has pods run where, and as, the object says.
func place(pod *corev1.PodSpec, spec hppv1.HostPathProvisionerSpec) {
	// The selector of the manifests is for those who give none: a user's is used as it is.
	if len(spec.Workload.NodeSelector) > 0 {
		pod.NodeSelector = maps.Clone(spec.Workload.NodeSelector)
	}
	pod.Affinity = spec.Workload.Affinity.DeepCopy()
	// Not those of the manifests, which tolerate everything: the nodes are those that the user has had so far.
	pod.Tolerations = nil
	for _, t := range spec.Workload.Tolerations {
		pod.Tolerations = append(pod.Tolerations, *t.DeepCopy())
	}
	if spec.PriorityClassName != "" {
		pod.PriorityClassName = spec.PriorityClassName
	}
	pod.ImagePullSecrets = slices.Clone(spec.ImagePullSecrets)
}

func moveKubelet(pod *corev1.PodSpec, to string) {
	if to == "" || to == kubeletDirectory {
		return
	}
	moved := func(path string) string {
		if rest, ok := strings.CutPrefix(path, kubeletDirectory); ok && (rest == "" || rest[0] == '/') {
			return to + rest
		}
		return path
	}
	for i := range pod.Volumes {
		if host := pod.Volumes[i].HostPath; host != nil {
			host.Path = moved(host.Path)
		}
	}
	for i := range pod.Containers {
		c := &pod.Containers[i]
		for j := range c.VolumeMounts {
			c.VolumeMounts[j].MountPath = moved(c.VolumeMounts[j].MountPath)
		}
		for j, arg := range c.Args {
			if name, value, ok := strings.Cut(arg, "="); ok {
				c.Args[j] = name + "=" + moved(value)
			}
		}
	}
}

func setArg(c *corev1.Container, flag, value string) {
	arg := flag + "=" + value
	i := slices.IndexFunc(c.Args, func(a string) bool { return strings.HasPrefix(a, flag+"=") })
	if i < 0 {
		c.Args = append(c.Args, arg)
		return
	}
	c.Args[i] = arg
}

func setVariable(c *corev1.Container, name, value string) {
	variable := corev1.EnvVar{Name: name, Value: value}
	i := slices.IndexFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == name })
	if i < 0 {
		c.Env = append(c.Env, variable)
		return
	}
	c.Env[i] = variable
}
