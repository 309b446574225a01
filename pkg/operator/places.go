package operator

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/sets"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
)

// places are where pools on claims are, by the object, or were, by its record. The labels and annotations of a Deployment or a Job say
// anything: a user who may make one in the namespace would choose what a privileged pod unmounts. Spec and status of the object are written
// by administrators and by the operator alone.
func places(object *hppv1.HostPathProvisioner) []hppv1.MountedPool {
	return withPlaces(slices.Clone(object.Status.MountedPools), object)
}

// wantedPlaces are those by the object alone.
func wantedPlaces(object *hppv1.HostPathProvisioner) []hppv1.MountedPool {
	return withPlaces(nil, object)
}

func withPlaces(all []hppv1.MountedPool, object *hppv1.HostPathProvisioner) []hppv1.MountedPool {
	for _, pool := range render.Pools(object) {
		if place := (hppv1.MountedPool{Name: pool.Name, Path: path.Clean(string(pool.Path))}); pool.PVCTemplate != nil && !slices.Contains(all, place) {
			all = append(all, place)
		}
	}
	return all
}

// remember has the object know where pools may be mounted before any is: what changes the object meanwhile has the status that is written
// afterwards be refused. An object that breaks a rule of its definition has no status before Kubernetes 1.33. It is served without: what it is
// not known to have is reported when it is left, and not unmounted.
func (r *Reconciler) remember(ctx context.Context, object *hppv1.HostPathProvisioner) error {
	all := places(object)
	if len(all) == len(object.Status.MountedPools) {
		return nil
	}
	object.Status = status.Remember(object, all)
	if err := r.Client.Status().Update(ctx, object); err != nil && !apierrors.IsInvalid(err) {
		return fmt.Errorf("remember where pools are mounted: %w", err)
	}
	return nil
}

// findPlaces marks what is left of mounters at places of the object. It returns the places that the object is to remember: those that it
// asks for, and those at which something is left.
func findPlaces(object *hppv1.HostPathProvisioner, left []leftover) []hppv1.MountedPool {
	remembered := wantedPlaces(object)
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

// apart is an object without the pools whose path is, or lies in, that of another pool which is still to be unmounted on some node, with
// what they wait for in words. The driver would serve what is mounted there as theirs. A pool in a directory is another one than that on a
// claim which had its name. One on a claim that has a mounter keeps it.
func apart(object *hppv1.HostPathProvisioner, left []leftover, mounters map[string]render.Spot) (without *hppv1.HostPathProvisioner, waiting []string) {
	mounted := sets.New[string]()
	for _, spot := range mounters {
		mounted.Insert(spot.Pool)
	}
	without = object.DeepCopy()
	without.Spec.StoragePools = slices.DeleteFunc(without.Spec.StoragePools, func(pool hppv1.StoragePool) bool {
		onClaim := pool.PVCTemplate != nil
		if onClaim && mounted.Has(pool.Name) {
			return false
		}
		i := slices.IndexFunc(left, func(l leftover) bool {
			return l.known && (l.Pool != pool.Name || !onClaim) && strings.HasPrefix(path.Clean(string(pool.Path))+"/", path.Clean(l.Path)+"/")
		})
		if i >= 0 {
			waiting = append(waiting, fmt.Sprintf("pool %s: it comes once pool %s at %s on %s is unmounted", pool.Name, left[i].Pool, left[i].Path, left[i].Node))
		}
		return i >= 0
	})
	return without, waiting
}
