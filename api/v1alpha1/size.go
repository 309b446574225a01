package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Size is how much room the volume of a claim needs on another node, as far as the API server knows: the least of what the claim asks
// for, what it has, and what the volume has. The upstream driver has given each volume the size of its disk, and a volume that is to
// grow may not have grown.
func Size(claim *corev1.PersistentVolumeClaim, volume *corev1.PersistentVolume) resource.Quantity {
	size := *volume.Spec.Capacity.Storage()
	for _, other := range []*resource.Quantity{claim.Spec.Resources.Requests.Storage(), claim.Status.Capacity.Storage()} {
		if !other.IsZero() && (size.IsZero() || other.Cmp(size) < 0) {
			size = *other
		}
	}
	return size
}
