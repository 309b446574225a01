package operator

import (
	"path"
	"slices"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// places are where pools on claims are, by the object, or were, by its record. The labels and annotations of a Deployment or a Job say
// anything: whoever may make one in the namespace would choose what a privileged pod unmounts. Spec and status of the object are written
// by administrators and by the operator alone.
func places(object *hppv1.HostPathProvisioner) []hppv1.MountedPool {
	all := slices.Clone(object.Status.MountedPools)
	for _, pool := range render.Pools(object) {
		if place := (hppv1.MountedPool{Name: pool.Name, Path: path.Clean(string(pool.Path))}); pool.PVCTemplate != nil && !slices.Contains(all, place) {
			all = append(all, place)
		}
	}
	return all
}

// findPlaces marks what is left of mounters at places of the object. It returns the places that the object is to remember: those that it
// asks for, and those at which something is left.
func findPlaces(object *hppv1.HostPathProvisioner, left []leftover) []hppv1.MountedPool {
	wanted := object.DeepCopy()
	wanted.Status.MountedPools = nil
	remembered := places(wanted)
	all := places(object)
	for i := range left {
		l := &left[i]
		place := hppv1.MountedPool{Name: l.Pool, Path: path.Clean(l.Path)}
		l.known = slices.Contains(all, place) && l.Mounter == render.MounterName(l.Pool, l.Node)
		if l.known && !slices.Contains(remembered, place) {
			remembered = append(remembered, place)
		}
	}
	return remembered
}
