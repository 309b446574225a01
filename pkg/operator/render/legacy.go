package render

import (
	"errors"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
)

const legacyContainer = "provisioner"

// legacy is the pre-CSI provisioner, which has its volumes in the path that the driver has its own below.
func (r *Renderer) legacy(config *hppv1.PathConfig) ([]client.Object, error) {
	from := &r.manifests.legacy
	set := r.daemonSet(&from.daemonSet, LegacyDaemonSet, legacyAccount, legacyConstraints)
	pod, path := &set.Spec.Template.Spec, string(config.Path)
	const pool = "pool"
	volume := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == pool && v.HostPath != nil })
	container := slices.IndexFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == legacyContainer })
	if volume < 0 || container < 0 {
		return nil, errors.New("the manifests of the pre-CSI provisioner have no container " + legacyContainer + " or no hostPath volume " + pool)
	}
	pod.Volumes[volume].HostPath.Path = path
	c := &pod.Containers[container]
	for i := range c.VolumeMounts {
		if c.VolumeMounts[i].Name == pool {
			c.VolumeMounts[i].MountPath = path
		}
	}
	setVariable(c, "PV_DIR", path)
	setVariable(c, "USE_NAMING_PREFIX", strconv.FormatBool(config.UseNamingPrefix))
	r.metricsTLS(c)
	if err := r.container(c); err != nil {
		return nil, err
	}
	objects := append(r.rights(legacyAccount, legacyRole, from.rules, r.useOf(from.constraintsRules, legacyConstraints)), set)
	if r.facts.Monitoring {
		service := from.metricsService.DeepCopy()
		service.ObjectMeta = r.config.meta(service.Name, service.Labels)
		objects = append(objects, service)
	}
	return objects, nil
}

func (r *Renderer) legacyConstraints() *unstructured.Unstructured {
	constraints := r.manifests.legacy.constraints.DeepCopy()
	setMeta(constraints, r.config.clusterMeta(legacyConstraints, nil))
	return constraints
}

// DaemonSets are the names of the DaemonSets that an object asks for.
func DaemonSets(object *hppv1.HostPathProvisioner) []string {
	if object.Spec.PathConfig == nil {
		return []string{DriverDaemonSet}
	}
	return []string{DriverDaemonSet, LegacyDaemonSet}
}
