package operator

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// A spot is a pool on a node.
type spot struct{ pool, node string }

func spotOf(l *leftover) spot { return spot{l.Pool, l.Node} }

// users are the pods, in words, that use pools on nodes, of those that count. It does not matter whether their nodes are ready: what runs on
// one goes on. A volume whose pool is not known may be in any.
func (r *Reconciler) users(ctx context.Context, of []leftover, counts func(*corev1.Pod) bool) (map[spot][]string, error) {
	if len(of) == 0 {
		return nil, nil
	}
	volumes, err := r.volumes(ctx)
	if err != nil {
		return nil, err
	}
	claims := map[types.NamespacedName]string{}
	for _, volume := range volumes {
		if claim := volume.Spec.ClaimRef; claim != nil && place.OfDriver(&volume) {
			claims[types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}] = volume.Spec.CSI.VolumeAttributes[render.PoolParameter]
		}
	}
	users := map[spot]sets.Set[string]{}
	err = r.eachPod(ctx, func(pod *corev1.Pod) {
		if !counts(pod) {
			return
		}
		pools := poolsOf(pod, claims)
		for i := range of {
			if at := spotOf(&of[i]); at.node == pod.Spec.NodeName && (pools.HasAny(at.pool, "") || r.hasPathIn(pod, of[i].Path)) {
				if users[at] == nil {
					users[at] = sets.New[string]()
				}
				users[at].Insert("pod " + pod.Namespace + "/" + pod.Name)
			}
		}
	})
	found := map[spot][]string{}
	for at, pods := range users {
		found[at] = sets.List(pods)
	}
	return found, err
}

// hasPathIn says whether a pod has a directory of a pool as a hostPath volume, by its path. The driver's own pods have all pools so.
func (r *Reconciler) hasPathIn(pod *corev1.Pod, pool string) bool {
	if pod.Namespace == r.Config.Namespace && ofDriver(pod) {
		return false
	}
	data := render.DataDirectory(hppv1.StoragePool{Path: hppv1.HostDirectory(pool)})
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return v.HostPath != nil && strings.HasPrefix(path.Clean(v.HostPath.Path)+"/", data+"/")
	})
}

// poolsOf are the pools that the volumes of a pod are in, with an empty name for one that is not known.
func poolsOf(pod *corev1.Pod, ofClaims map[types.NamespacedName]string) sets.Set[string] {
	pools := sets.New[string]()
	for _, volume := range pod.Spec.Volumes {
		claim := ""
		switch {
		case volume.PersistentVolumeClaim != nil:
			claim = volume.PersistentVolumeClaim.ClaimName
		case volume.Ephemeral != nil:
			claim = pod.Name + "-" + volume.Name
		case volume.CSI != nil && volume.CSI.Driver == render.DriverName:
			pools.Insert(volume.CSI.VolumeAttributes[render.PoolParameter])
		}
		if pool, ours := ofClaims[types.NamespacedName{Namespace: pod.Namespace, Name: claim}]; ours {
			pools.Insert(pool)
		}
	}
	return pools
}

// few are the first of some pods, and how many more there are.
func few(pods []string) string {
	const most = 5
	if more := len(pods) - most; more > 0 {
		pods = append(slices.Clone(pods[:most]), fmt.Sprintf("%d more", more))
	}
	return strings.Join(pods, ", ")
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
