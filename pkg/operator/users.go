package operator

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// poolUsers are the pods, in words, that keep a pool from being unmounted, on nodes that are ready. Only the driver can unpublish their
// volumes.
func (r *Reconciler) poolUsers(ctx context.Context, object *hppv1.HostPathProvisioner) ([]string, error) {
	mounters, err := r.mountersThere(ctx)
	if err != nil || len(mounters) == 0 {
		return nil, err
	}
	mounted := map[string]sets.Set[string]{}
	for i := range mounters {
		l := render.LeftoverOf(&mounters[i])
		if _, ready, err := r.answers(ctx, l.Node); err != nil {
			return nil, err
		} else if ready {
			if mounted[l.Node] == nil {
				mounted[l.Node] = sets.New[string]()
			}
			mounted[l.Node].Insert(l.Pool)
		}
	}
	volumes, err := r.volumes(ctx)
	if err != nil {
		return nil, err
	}
	pools := map[types.NamespacedName]string{}
	for _, volume := range volumes {
		if claim := volume.Spec.ClaimRef; claim != nil && place.OfDriver(&volume) {
			pools[types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}] = cmp.Or(volume.Spec.CSI.VolumeAttributes[render.PoolParameter], hppv1.LegacyPool)
		}
	}
	var users []string
	err = r.eachPod(ctx, func(pod *corev1.Pod) {
		for i := range pod.Spec.Volumes {
			if pool := poolOfVolume(object, pools, pod, &pod.Spec.Volumes[i]); mounted[pod.Spec.NodeName].Has(pool) {
				users = append(users, fmt.Sprintf("pod %s/%s on %s, which uses pool %s", pod.Namespace, pod.Name, pod.Spec.NodeName, pool))
			}
		}
	})
	slices.Sort(users)
	users = slices.Compact(users)
	const most = 5
	if more := len(users) - most; more > 0 {
		users = append(users[:most], fmt.Sprintf("%d more pods", more))
	}
	return users, err
}

// poolOfVolume is the pool that a volume of a pod is in, or empty if it is not of the driver.
func poolOfVolume(object *hppv1.HostPathProvisioner, ofClaims map[types.NamespacedName]string, pod *corev1.Pod, volume *corev1.Volume) string {
	switch {
	case volume.PersistentVolumeClaim != nil:
		return ofClaims[types.NamespacedName{Namespace: pod.Namespace, Name: volume.PersistentVolumeClaim.ClaimName}]
	case volume.Ephemeral != nil:
		return ofClaims[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name + "-" + volume.Name}]
	case volume.CSI == nil || volume.CSI.Driver != render.DriverName:
		return ""
	}
	first := ""
	if pools := render.Pools(object); len(pools) > 0 {
		first = pools[0].Name
	}
	// The driver takes its first pool if a volume names none.
	return cmp.Or(volume.CSI.VolumeAttributes[render.PoolParameter], first)
}

// eachPod reads all pods of the cluster that have not ended, page by page.
func (r *Reconciler) eachPod(ctx context.Context, do func(*corev1.Pod)) error {
	for next := ""; ; {
		list := &corev1.PodList{}
		if err := r.APIReader.List(ctx, list, client.Limit(500), client.Continue(next)); err != nil {
			return err
		}
		for i := range list.Items {
			if phase := list.Items[i].Status.Phase; phase != corev1.PodSucceeded && phase != corev1.PodFailed {
				do(&list.Items[i])
			}
		}
		if next = list.Continue; next == "" {
			return nil
		}
	}
}
