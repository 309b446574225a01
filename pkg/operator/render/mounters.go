package render

import (
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"path"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
)

const (
	// mounterLabel has the name of a Deployment, so that each has pods of its own.
	mounterLabel = "hostpathprovisioner.kubevirt.io/mounter"
	// nodeAnnotation and pathAnnotation say on what node a mounter has what path. The clean-up uses them, and
	// nothing of the object, which may have changed.
	nodeAnnotation = "hostpathprovisioner.kubevirt.io/node"
	pathAnnotation = "hostpathprovisioner.kubevirt.io/path"
	// keepsAnnotation is on pods of mounters that hold a lock as long as they run.
	keepsAnnotation = "hostpathprovisioner.kubevirt.io/keeps"
	// devicePath and volumePath are where a claim is in the container of a mounter.
	devicePath, volumePath = "/dev/pool", "/volume"
	// maxName is what the value of a label may have, and so the names that are used as one.
	maxName = 63
)

// MounterName is the name of what a pool has on a node: its Deployment, and its claim if that is not shared.
func MounterName(pool, node string) string { return shortName("hpp-pool-", pool+"-"+node) }

func claimName(pool *hppv1.StoragePool, node string) string {
	if pool.IsShared() {
		return claimOfAll(pool.Name)
	}
	return MounterName(pool.Name, node)
}

func claimOfAll(pool string) string { return shortName("hpp-pool-", pool+"-shared") }

// onDevice says whether the claims of a pool are devices.
func onDevice(pool *hppv1.StoragePool) bool {
	mode := pool.PVCTemplate.VolumeMode
	return mode != nil && *mode == corev1.PersistentVolumeBlock
}

// shortName is a name that is hashed if it would be too long. The upstream operator has the same names.
func shortName(prefix, rest string) string {
	name := prefix + rest
	if len(name) <= maxName {
		return name
	}
	hash := fnv.New32a()
	hash.Write([]byte(name))
	return fmt.Sprintf("%s%08x", prefix, hash.Sum32())
}

// PoolLabels are on everything that is for a pool.
func PoolLabels(pool string) map[string]string {
	return map[string]string{PoolLabel: pool + "-hpp", UpstreamPoolLabel: pool + "-hpp"}
}

// Claims are those that the pools with a template need, by name.
func (r *Renderer) Claims() (claims []*corev1.PersistentVolumeClaim) {
	found := map[string]*corev1.PersistentVolumeClaim{}
	for _, at := range r.spots {
		name := claimName(at.pool, at.node)
		found[name] = &corev1.PersistentVolumeClaim{ObjectMeta: r.config.meta(name, PoolLabels(at.pool.Name)), Spec: *at.pool.PVCTemplate.Spec()}
	}
	for _, name := range sortedKeys(found) {
		claims = append(claims, found[name])
	}
	return claims
}

// mounters are the Deployments that keep the claims of pools mounted: one for each pool and node.
func (r *Renderer) mounters() (all []*appsv1.Deployment, err error) {
	for _, at := range r.spots {
		one, err := r.mounter(at.pool, at.node)
		if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	return all, nil
}

func (r *Renderer) mounter(pool *hppv1.StoragePool, node string) (*appsv1.Deployment, error) {
	name := MounterName(pool.Name, node)
	d := r.manifests.mounter.DeepCopy()
	d.ObjectMeta = r.config.meta(name, d.Labels)
	maps.Copy(d.Labels, PoolLabels(pool.Name))
	d.Annotations = map[string]string{nodeAnnotation: node, pathAnnotation: string(pool.Path)}
	d.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{mounterLabel: name}}
	labels := d.Spec.Template.Labels
	maps.Copy(labels, r.config.labels())
	maps.Copy(labels, PoolLabels(pool.Name))
	labels[mounterLabel] = name
	d.Spec.Strategy = r.strategy(pool, node)
	r.mounterPod(&d.Spec.Template, node)
	pod := &d.Spec.Template.Spec
	pod.Volumes = slices.Clone(pod.Volumes)
	for i := range pod.Volumes {
		switch v := &pod.Volumes[i]; {
		case v.HostPath != nil:
			v.HostPath.Path = string(pool.Path)
		case v.PersistentVolumeClaim != nil:
			v.PersistentVolumeClaim.ClaimName = claimName(pool, node)
		}
	}
	c := &pod.Containers[0]
	if !onDevice(pool) {
		useVolume(c)
	} else {
		if pool.FSType != "" {
			setArg(c, "--fs-type", pool.FSType)
		}
		if len(pool.MountOptions) > 0 {
			setArg(c, "--mount-options", strings.Join(pool.MountOptions, ","))
		}
	}
	return d, r.mounterContainer(c)
}

// strategy has the next pod of a mounter start before the last one ends, so that its claim is never without one and stays attached. A
// claim that only one pod may have would keep the next one waiting for ever.
func (r *Renderer) strategy(pool *hppv1.StoragePool, node string) appsv1.DeploymentStrategy {
	claim := claimName(pool, node)
	_, made := r.facts.ClaimPools[claim] // by an earlier template, maybe
	if r.facts.ExclusiveClaims.Has(claim) || !made && slices.Contains(pool.PVCTemplate.AccessModes, corev1.ReadWriteOncePod) {
		return appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType}
	}
	return appsv1.DeploymentStrategy{Type: appsv1.RollingUpdateDeploymentStrategyType, RollingUpdate: &appsv1.RollingUpdateDeployment{
		MaxUnavailable: new(intstr.FromInt32(0)), MaxSurge: new(intstr.FromInt32(1)),
	}}
}

// useVolume has a mounter take a claim that has a filesystem instead of a device.
func useVolume(c *corev1.Container) {
	const device, volume = "--device=" + devicePath, "--volume=" + volumePath
	c.VolumeDevices = nil
	c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "claim", MountPath: volumePath})
	replace := func(args []string) []string {
		args = slices.DeleteFunc(args, func(a string) bool { return strings.HasPrefix(a, "--fs-type=") })
		for i := range args {
			if args[i] == device {
				args[i] = volume
			}
		}
		return args
	}
	c.Args = replace(c.Args)
	c.ReadinessProbe.Exec.Command = replace(c.ReadinessProbe.Exec.Command)
}

// mounterPod sets what the pods of a mounter and of its clean-up have in common. The node is chosen by its name, which
// its hostname label need not be.
func (r *Renderer) mounterPod(template *corev1.PodTemplateSpec, node string) {
	pod := &template.Spec
	pod.ServiceAccountName = driverAccount
	pod.ImagePullSecrets = slices.Clone(r.object.Spec.ImagePullSecrets)
	pod.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{
			Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node},
		}}}},
	}}}
	if r.facts.OpenShift {
		metav1.SetMetaDataAnnotation(&template.ObjectMeta, requiredConstraints, driverConstraints)
	}
}

func (r *Renderer) mounterContainer(c *corev1.Container) error {
	resources := c.Resources
	if err := r.container(c); err != nil {
		return err
	}
	c.Resources = resources
	if of := r.object.Spec.Resources.Mounter; of != nil {
		c.Resources = *of.DeepCopy()
	}
	return nil
}

// A Leftover is a pool on a node that may be mounted there and is not wanted any more.
type Leftover struct {
	// Mounter is the name of the Deployment that has mounted it.
	Mounter          string
	Pool, Node, Path string
	// Claim is the name of the claim that it is on, if that can be used, and Block says that its volume mode is Block.
	Claim string
	Block bool
}

// LeftoverOf reads what a mounter is for: from its annotations, and of one of the upstream operator from its pod.
func LeftoverOf(d *appsv1.Deployment) Leftover {
	l := Leftover{Mounter: d.Name, Pool: PoolOf(d.Labels), Node: d.Annotations[nodeAnnotation], Path: d.Annotations[pathAnnotation]}
	pod := &d.Spec.Template.Spec
	if l.Path == "" && len(pod.Containers) > 0 {
		c := pod.Containers[0]
		words := slices.Concat(c.Command, c.Args)
		if i := slices.Index(words, "--mountPath"); i >= 0 && i+1 < len(words) {
			l.Path, _ = strings.CutSuffix(words[i+1], "/csi")
		}
	}
	if l.Node == "" {
		l.Node = hostname(pod.Affinity)
	}
	l.Claim, l.Block = claimIn(pod)
	return l
}

// claimIn is the claim that a pod of a mounter or of a clean-up has, and whether as a device.
func claimIn(pod *corev1.PodSpec) (name string, block bool) {
	for _, v := range pod.Volumes {
		if v.PersistentVolumeClaim == nil {
			continue
		}
		name = v.PersistentVolumeClaim.ClaimName
		block = slices.ContainsFunc(pod.Containers, func(c corev1.Container) bool {
			return slices.ContainsFunc(c.VolumeDevices, func(d corev1.VolumeDevice) bool { return d.Name == v.Name })
		})
	}
	return name, block
}

// CleanUpOf reads what a Job unmounts. It is all that is known of a pool whose mounter was deleted meanwhile.
func CleanUpOf(job *batchv1.Job) Leftover {
	l := Leftover{Mounter: job.Annotations[mounterLabel], Pool: PoolOf(job.Labels), Node: job.Annotations[nodeAnnotation], Path: job.Annotations[pathAnnotation]}
	l.Claim, l.Block = claimIn(&job.Spec.Template.Spec)
	return l
}

// Keeps says whether a mounter's pod has a lock for as long as it keeps its pool mounted, so that a clean-up can begin beside it. Those
// of the upstream operator have none.
func Keeps(pod *corev1.Pod) bool { return pod.Annotations[keepsAnnotation] != "" }

// Moves says whether what is wanted instead of a mounter has another path, or another claim of the pool: it could mount neither before the first
// is unmounted. One of the upstream operator has its path cleaned. Any other claim is not the operator's: a user has named it in the mounter.
func (l Leftover) Moves(to *unstructured.Unstructured) bool {
	own := []string{MounterName(l.Pool, l.Node), claimOfAll(l.Pool)}
	return l.Path != "" && path.Clean(l.Path) != path.Clean(to.GetAnnotations()[pathAnnotation]) || slices.Contains(own, l.Claim) && !hasClaim(to, l.Claim)
}

// hasClaim says whether the pods of a mounter have a claim.
func hasClaim(mounter *unstructured.Unstructured, name string) bool {
	volumes, _, _ := unstructured.NestedSlice(mounter.Object, "spec", "template", "spec", "volumes")
	return slices.ContainsFunc(volumes, func(v any) bool {
		volume, _ := v.(map[string]any)
		claim, _, _ := unstructured.NestedString(volume, "persistentVolumeClaim", "claimName")
		return claim == name
	})
}

// hostname is the one that the pods of the upstream operator are for. It is the name of the node, whatever its label.
func hostname(affinity *corev1.Affinity) string {
	for _, term := range nodeTerms(affinity) {
		for _, e := range term.MatchExpressions {
			if e.Key == corev1.LabelHostname && len(e.Values) == 1 {
				return e.Values[0]
			}
		}
	}
	return ""
}

func nodeTerms(affinity *corev1.Affinity) []corev1.NodeSelectorTerm {
	if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil
	}
	return affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
}

// CleanUpName is the name of the Job that unmounts what a mounter has mounted.
func CleanUpName(mounter string) string {
	return shortName("cleanup-pool-", strings.TrimPrefix(mounter, "hpp-pool-"))
}

// CleanUpJob unmounts a pool on a node. It has the claim, which stays attached to the node until the pool is unmounted. Its pod runs once no volume of
// the pool is published.
func (r *Renderer) CleanUpJob(l Leftover) (*batchv1.Job, error) {
	job := r.manifests.unmount.DeepCopy()
	job.ObjectMeta = r.config.meta(CleanUpName(l.Mounter), job.Labels)
	maps.Copy(job.Labels, PoolLabels(l.Pool))
	job.Annotations = map[string]string{mounterLabel: l.Mounter, nodeAnnotation: l.Node, pathAnnotation: l.Path}
	maps.Copy(job.Spec.Template.Labels, r.config.labels())
	maps.Copy(job.Spec.Template.Labels, PoolLabels(l.Pool))
	r.mounterPod(&job.Spec.Template, l.Node)
	pod := &job.Spec.Template.Spec
	moveKubelet(pod, r.object.Spec.KubeletDirectory)
	for i := range pod.Volumes {
		if host := pod.Volumes[i].HostPath; host != nil && pod.Volumes[i].Name == "pool" {
			host.Path = l.Path
		}
	}
	if l.Claim != "" {
		c, name := &pod.Containers[0], "claim"
		pod.Volumes = append(pod.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: l.Claim},
		}})
		if l.Block {
			c.VolumeDevices = []corev1.VolumeDevice{{Name: name, DevicePath: devicePath}}
			c.Args = append(c.Args, "--device="+devicePath)
		} else {
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: name, MountPath: volumePath})
			c.Args = append(c.Args, "--volume="+volumePath)
		}
	}
	return job, errors.Join(r.mounterContainer(&pod.InitContainers[0]), r.mounterContainer(&pod.Containers[0]))
}

// NodeOf is the node of a pod of a DaemonSet, also while it is not scheduled.
func NodeOf(pod *corev1.Pod) string {
	if pod.Spec.NodeName != "" {
		return pod.Spec.NodeName
	}
	for _, term := range nodeTerms(pod.Spec.Affinity) {
		for _, field := range term.MatchFields {
			if field.Key == metav1.ObjectNameField && len(field.Values) == 1 {
				return field.Values[0]
			}
		}
	}
	return ""
}

// PoolOf is the pool that an object is for by its labels, or empty.
func PoolOf(labels map[string]string) string {
	name, _ := strings.CutSuffix(labels[PoolLabel], "-hpp")
	return name
}
