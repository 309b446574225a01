package render

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
)

// Pools are those of an object. The directory of pathConfig is a pool too.
func Pools(object *hppv1.HostPathProvisioner) []hppv1.StoragePool {
	if config := object.Spec.PathConfig; config != nil {
		return []hppv1.StoragePool{{Name: hppv1.LegacyPool, Path: config.Path}}
	}
	return object.Spec.StoragePools
}

// DataDirectory is where the volumes of a pool are, next to what the provisioner from before CSI has in its path.
func DataDirectory(p hppv1.StoragePool) string { return path.Join(string(p.Path), "csi") }

// A driverPool is a pool as the driver's --datadir has it.
type driverPool struct {
	Name             string      `json:"name"`
	Path             string      `json:"path"`
	SnapshotPath     string      `json:"snapshotPath,omitempty"`
	SnapshotProvider string      `json:"snapshotProvider,omitempty"`
	Shared           bool        `json:"shared"`
	RequireMount     bool        `json:"requireMount,omitempty"`
	Enforcement      string      `json:"enforcement,omitempty"`
	Reserve          string      `json:"reserve,omitempty"`
	Overprovision    json.Number `json:"overprovision,omitempty"`
	Allocation       string      `json:"allocation,omitempty"`
	BytesPerInode    *int64      `json:"bytesPerInode,omitempty"`
	Relabel          string      `json:"relabel,omitempty"`
	AllowMany        bool        `json:"allowReadWriteMany,omitempty"`
}

// dataDirVariable is what the container of the driver has the pools in.
const dataDirVariable = "DATADIR"

func dataDir(from []hppv1.StoragePool) (string, error) {
	if len(from) == 0 {
		// The driver unpublishes what is left in pools that it does not have any more, but does not start without one.
		from = []hppv1.StoragePool{{Name: "none", Path: "/none", RequireMount: new(true)}}
	}
	to := make([]driverPool, 0, len(from))
	for _, p := range from {
		one := driverPool{
			Name:          p.Name,
			Path:          DataDirectory(p),
			Shared:        p.IsShared(),
			RequireMount:  p.PVCTemplate != nil || p.RequireMount != nil && *p.RequireMount,
			Enforcement:   p.Enforcement,
			Reserve:       p.Reserve,
			Overprovision: json.Number(p.Overprovision),
			Allocation:    p.Allocation,
			BytesPerInode: p.BytesPerInode,
			Relabel:       p.Relabel,
			AllowMany:     p.AllowReadWriteMany,
		}
		if p.SnapshotProvider != nil {
			one.SnapshotProvider = *p.SnapshotProvider
			one.SnapshotPath = path.Join(one.Path, "snapshots")
		}
		to = append(to, one)
	}
	text, err := json.Marshal(to)
	return string(text), err
}

// DeployedPools are those that the driver of a DaemonSet has, of this operator or of the upstream one. Which of them are on claims it does not say.
func DeployedPools(set *appsv1.DaemonSet) ([]hppv1.StoragePool, error) {
	for _, container := range set.Spec.Template.Spec.Containers {
		value, found := dataDirOf(container)
		if !found {
			continue
		}
		var has []driverPool
		if err := json.Unmarshal([]byte(value), &has); err != nil {
			return nil, fmt.Errorf("the pools of the driver of %s cannot be read: %w", set.Name, err)
		}
		var pools []hppv1.StoragePool
		for _, p := range has {
			pools = append(pools, hppv1.StoragePool{Name: p.Name, Path: hppv1.HostDirectory(path.Dir(p.Path)), RequireMount: &p.RequireMount, Enforcement: p.Enforcement})
		}
		return pools, nil
	}
	return nil, fmt.Errorf("%s does not say which pools its driver has", set.Name)
}

// dataDirOf is the --datadir of a container, which names a variable.
func dataDirOf(container corev1.Container) (value string, found bool) {
	for _, arg := range container.Args {
		if value, found = strings.CutPrefix(arg, "--datadir="); !found {
			continue
		}
		i := slices.IndexFunc(container.Env, func(e corev1.EnvVar) bool { return value == "$("+e.Name+")" })
		if i >= 0 {
			return container.Env[i].Value, true
		}
		return value, true
	}
	return "", false
}

// Notices are what a user should know of what the object asks for.
func Notices(object *hppv1.HostPathProvisioner) []string {
	var texts []string
	if object.HasFeature(hppv1.Freezing) && !object.HasFeature(hppv1.Snapshotting) {
		texts = append(texts, "The feature gate Freezing has no effect without Snapshotting")
	}
	pools := Pools(object)
	classes := overlayPools(pools)
	for _, pool := range pools {
		if name := overlayClass(pool); name != "" && classes[name] != pool.Name {
			texts = append(texts, fmt.Sprintf("The pool %s has no StorageClass, because %s is that of pool %s: give it an overlayClassName of its own", pool.Name, name, classes[name]))
		}
	}
	return texts
}

// addPools gives a container the directories of the pools, at the paths that they have on the host, so that messages
// name paths which people can find there.
func addPools(pod *corev1.PodSpec, container *corev1.Container, of []hppv1.StoragePool) {
	kind, propagation := corev1.HostPathDirectoryOrCreate, corev1.MountPropagationHostToContainer
	for _, p := range of {
		name := "pool-" + p.Name
		pod.Volumes = append(pod.Volumes, corev1.Volume{
			Name:         name,
			VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: string(p.Path), Type: &kind}},
		})
		container.VolumeMounts = append(container.VolumeMounts, corev1.VolumeMount{
			Name: name, MountPath: string(p.Path), MountPropagation: &propagation,
		})
	}
}

// removePool removes the directory of the one pool that the manifests have.
func removePool(pod *corev1.PodSpec, container *corev1.Container) {
	const name = "pool-local"
	pod.Volumes = slices.DeleteFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	container.VolumeMounts = slices.DeleteFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == name })
}
