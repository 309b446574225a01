package provisioner

import (
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"

	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// checkRequest finds everything in a claim and its class that a directory cannot be.
func (c Config) checkRequest(o controller.ProvisionOptions) error {
	return errors.Join(c.checkClaim(o.PVC), c.checkClass(o.StorageClass))
}

func (c Config) checkClaim(claim *corev1.PersistentVolumeClaim) error {
	var problems []error
	refuse := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if c.Mode == PerNode {
		for _, mode := range claim.Spec.AccessModes {
			if mode != corev1.ReadWriteOnce {
				refuse("access mode %s is not supported: a directory of one node is ReadWriteOnce", mode)
			}
		}
	}
	if claim.Spec.Selector != nil {
		refuse("a claim with a selector cannot be provisioned dynamically: remove spec.selector")
	}
	if claim.Spec.DataSource != nil || claim.Spec.DataSourceRef != nil {
		refuse("a data source is not supported: the volume would be empty")
	}
	if claim.Spec.VolumeAttributesClassName != nil && *claim.Spec.VolumeAttributesClassName != "" {
		refuse("a VolumeAttributesClass is not supported: remove spec.volumeAttributesClassName")
	}
	return errors.Join(problems...)
}

func (c Config) checkClass(class *storagev1.StorageClass) error {
	var problems []error
	if len(class.MountOptions) > 0 {
		problems = append(problems, fmt.Errorf("StorageClass %s has mountOptions %q: hostPath volumes are not mounted and have none; remove them", class.Name, class.MountOptions))
	}
	if policy := c.reclaimPolicy(class); policy != corev1.PersistentVolumeReclaimDelete && policy != corev1.PersistentVolumeReclaimRetain {
		problems = append(problems, fmt.Errorf("StorageClass %s has reclaimPolicy %s: use Delete or Retain", class.Name, policy))
	}
	return errors.Join(problems...)
}

// reclaimPolicy is that of new PersistentVolumes.
func (c Config) reclaimPolicy(class *storagev1.StorageClass) corev1.PersistentVolumeReclaimPolicy {
	switch {
	case c.ReclaimPolicy != "":
		return c.ReclaimPolicy
	case class.ReclaimPolicy != nil:
		return *class.ReclaimPolicy
	}
	return corev1.PersistentVolumeReclaimDelete // the default of StorageClass.reclaimPolicy
}

// checkTopologies refuses a node that the class leaves out. The scheduler honours allowedTopologies only for claims
// whose node it chooses.
func checkTopologies(allowed []corev1.TopologySelectorTerm, node *corev1.Node) error {
	if len(allowed) == 0 {
		return nil
	}
	for _, term := range allowed {
		matches := !slices.ContainsFunc(term.MatchLabelExpressions, func(r corev1.TopologySelectorLabelRequirement) bool {
			return !slices.Contains(r.Values, node.Labels[r.Key])
		})
		if matches {
			return nil
		}
	}
	return fmt.Errorf("node %s is not one of the StorageClass's allowedTopologies: name a node of those, or use another StorageClass", node.Name)
}

// persistentVolume describes a directory to Kubernetes.
func (c Config) persistentVolume(o controller.ProvisionOptions, id volume.ID, node *corev1.Node) *corev1.PersistentVolume {
	isDirectory, mode := corev1.HostPathDirectory, corev1.PersistentVolumeFilesystem
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: o.PVName, Annotations: map[string]string{origin.Identity: c.identity()}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: o.PVC.Spec.Resources.Requests[corev1.ResourceStorage]},
			AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeReclaimPolicy: c.reclaimPolicy(o.StorageClass),
			VolumeMode:                    &mode,
			// With a type kubelet refuses a directory that is missing, instead of making an empty one.
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: c.path(id), Type: &isDirectory}},
		},
	}
	if c.Mode == PerNode {
		pv.Annotations[origin.ProvisionOnNode] = c.Node
	} else {
		pv.Spec.AccessModes = slices.Clone(o.PVC.Spec.AccessModes)
	}
	if !c.Shared {
		pv.Spec.NodeAffinity = onHost(node.Labels[corev1.LabelHostname])
	}
	return pv
}

// identity is what the upstream program of this form writes, and wants to see before it deletes a volume.
func (c Config) identity() string {
	if c.Mode == SingleNode {
		return c.Node
	}
	return origin.PerNodeName
}

func onHost(hostname string) *corev1.VolumeNodeAffinity {
	return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{
			Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{hostname},
		}},
	}}}}
}
