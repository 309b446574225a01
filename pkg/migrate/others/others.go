package others

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

// Others are what the cluster has besides a PersistentVolume.
type Others struct {
	// Volumes are all other PersistentVolumes, and Pods those that run or will, of nodes that have the directory.
	Volumes []corev1.PersistentVolume
	Pods    []corev1.Pod
	// Node has the directory, or else Anywhere says that all nodes do.
	Node     *corev1.Node
	Anywhere bool
}

// Check refuses directories that a PersistentVolume has, of any provisioner, or a pod without the claim of the volume.
func (o *Others) Check(directories *Watch) error {
	return errors.Join(o.checkVolumes(directories), o.checkPods(directories))
}

func (o *Others) checkVolumes(directories *Watch) error {
	for i := range o.Volumes {
		pv := &o.Volumes[i]
		if !o.Anywhere && !origin.MayUse(pv, o.Node) {
			continue
		}
		has, err := directories.LeadsTo(origin.Path(pv))
		if err != nil {
			return fmt.Errorf("PersistentVolume %s: %w", pv.Name, err)
		}
		if has {
			return fmt.Errorf("PersistentVolume %s has the directory too, as %s: delete the one that is not used", pv.Name, origin.Path(pv))
		}
	}
	return nil
}

func (o *Others) checkPods(directories *Watch) error {
	claims := o.claims()
	for i := range o.Pods {
		pod := &o.Pods[i]
		for _, v := range pod.Spec.Volumes {
			for _, at := range paths(pod, v, claims) {
				if err := checkVolume(pod, v.Name, at, directories); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// claims are the directories of claims. One that was made anew has the name of that of an earlier volume, which is retained.
func (o *Others) claims() map[types.NamespacedName][]string {
	all := make(map[types.NamespacedName][]string)
	for i := range o.Volumes {
		if ref, at := o.Volumes[i].Spec.ClaimRef, origin.Path(&o.Volumes[i]); ref != nil && at != "" {
			name := types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}
			all[name] = append(all[name], at)
		}
	}
	return all
}

// paths are what a volume of a pod may be of, on the node; none if that is something else.
func paths(pod *corev1.Pod, v corev1.Volume, claims map[types.NamespacedName][]string) []string {
	claim := types.NamespacedName{Namespace: pod.Namespace}
	switch {
	case v.HostPath != nil:
		return []string{v.HostPath.Path}
	case v.PersistentVolumeClaim != nil:
		claim.Name = v.PersistentVolumeClaim.ClaimName
	case v.Ephemeral != nil:
		claim.Name = pod.Name + "-" + v.Name
	}
	return claims[claim]
}

// checkVolume refuses a volume of a pod that is one of the directories, or has it as a subPath.
func checkVolume(pod *corev1.Pod, name, at string, directories *Watch) error {
	who, paths := fmt.Sprintf("pod %s/%s", pod.Namespace, pod.Name), []string{at}
	for _, mount := range volumeMounts(pod) {
		if mount.Name != name {
			continue
		}
		if mount.SubPathExpr != "" {
			above, err := directories.IsAbove(at)
			if err != nil {
				return fmt.Errorf("%s: %w", who, err)
			}
			if above {
				return fmt.Errorf("%s has the subPath %s of %s, which may be the directory: end it first", who, mount.SubPathExpr, at)
			}
		}
		paths = append(paths, filepath.Join(at, mount.SubPath))
	}
	for _, path := range paths {
		has, err := directories.LeadsTo(path)
		if err != nil {
			return fmt.Errorf("%s: %w", who, err)
		}
		if has {
			return fmt.Errorf("%s has the directory as %s: end it first", who, path)
		}
	}
	return nil
}

func volumeMounts(pod *corev1.Pod) (all []corev1.VolumeMount) {
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		all = append(all, c.VolumeMounts...)
	}
	for _, c := range pod.Spec.EphemeralContainers {
		all = append(all, c.VolumeMounts...)
	}
	return all
}
