package operator

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/schedule"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

// A cluster is read: what belongs to the operator from the caches of the manager, and what is not worth a cache from the API server.
type cluster struct {
	client.Client
	api       client.Reader
	namespace string
	now       func() time.Time
}

func (r *Reconciler) cluster() *cluster {
	return &cluster{r.Client, r.APIReader, r.Config.Namespace, r.now}
}

// get reads an object of the operator's namespace from the cache, or returns nil. The cache has the content that is not
// compiled in too, so that there is one for all.
func get[T any, P interface {
	*T
	client.Object
}](ctx context.Context, c *cluster, name string) (P, error) {
	typed := P(new(T))
	kind, err := c.GroupVersionKindFor(typed)
	if err != nil {
		return nil, err
	}
	live := empty(kind)
	if err := c.Get(ctx, client.ObjectKey{Namespace: c.namespace, Name: name}, live); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return typed, runtime.DefaultUnstructuredConverter.FromUnstructured(live.Object, typed)
}

// list reads objects from the same cache.
func list[T any, P interface {
	*T
	client.Object
}](ctx context.Context, c *cluster, options ...client.ListOption) ([]T, error) {
	return listFrom[T, P](ctx, c, c.Client, options...)
}

// listFrom reads objects from this cache or from the API server.
func listFrom[T any, P interface {
	*T
	client.Object
}](ctx context.Context, c *cluster, from client.Reader, options ...client.ListOption) ([]T, error) {
	kind, err := c.GroupVersionKindFor(P(new(T)))
	if err != nil {
		return nil, err
	}
	live := &unstructured.UnstructuredList{}
	live.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	if err := from.List(ctx, live, options...); err != nil {
		return nil, err
	}
	found := make([]T, len(live.Items))
	for i := range live.Items {
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(live.Items[i].Object, &found[i]); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// pods are those of the operator's namespace that it has made, and its own.
func (c *cluster) pods(ctx context.Context) ([]corev1.Pod, error) {
	pods := &corev1.PodList{}
	err := c.List(ctx, pods, client.InNamespace(c.namespace), client.MatchingLabels{render.AppLabel: render.App})
	return pods.Items, err
}

func (c *cluster) claims(ctx context.Context) ([]corev1.PersistentVolumeClaim, error) {
	claims := &corev1.PersistentVolumeClaimList{}
	err := c.List(ctx, claims, client.InNamespace(c.namespace))
	return claims.Items, err
}

// ownedPod says whether a pod is of the driver or keeps a pool mounted, and not the operator's own.
func ownedPod(pod *corev1.Pod) bool { return ofDriver(pod) || ofPool(pod) && !ofJob(pod) }

// ofPool says whether a pod keeps a pool mounted or unmounts it.
func ofPool(pod *corev1.Pod) bool { return render.PoolOf(pod.Labels) != "" }

func ofJob(pod *corev1.Pod) bool { _, found := pod.Labels[jobNameLabel]; return found }

// ofDriver says whether a pod is of one of the DaemonSets.
func ofDriver(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "DaemonSet" })
}

func ofDaemonSet(pod *corev1.Pod, name string) bool {
	return slices.ContainsFunc(pod.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "DaemonSet" && o.Name == name })
}

// nodes are those that the driver is to run on: where the DaemonSet has pods, also ones that wait or end. While it has
// not as many as it should have, a node without a pod is one whose pod is being replaced, and keeps its pools. Kubernetes counts the nodes that
// have a pod, also one that is being deleted, until that has ended (getNodesToDaemonPods): on a node that does not answer it stays.
func (c *cluster) nodes(ctx context.Context, set *appsv1.DaemonSet, mounted map[string]*leftover) ([]string, error) {
	pods, err := c.pods(ctx)
	if err != nil {
		return nil, err
	}
	found, counted := sets.New[string](), sets.New[string]()
	for i := range pods {
		pod := &pods[i]
		if node := render.NodeOf(pod); node != "" && ofDriver(pod) {
			found.Insert(node)
			if set != nil && ofDaemonSet(pod, set.Name) && (pod.DeletionTimestamp == nil || !ended(pod)) {
				counted.Insert(node)
			}
		}
	}
	settled := set != nil && set.Status.ObservedGeneration == set.Generation && set.Status.ObservedGeneration > 0 &&
		set.Status.CurrentNumberScheduled == set.Status.DesiredNumberScheduled &&
		int(set.Status.DesiredNumberScheduled+set.Status.NumberMisscheduled) == counted.Len()
	for _, l := range mounted {
		if !settled && l.mounter != nil && l.Node != "" {
			found.Insert(l.Node)
		}
	}
	return sets.List(found), nil
}

// choices are what is known of whether nodes are to have the driver, for as long as the DaemonSet counts them as before. What changes one changes
// the counts, nearly always.
type choices struct {
	generation         int64
	desired, misplaced int32
	until              time.Time
	isChosen           map[string]bool
}

// reset forgets what may have changed.
func (c *choices) reset(set *appsv1.DaemonSet, now time.Time, resync time.Duration) {
	counts := &set.Status
	if c.generation == set.Generation && c.desired == counts.DesiredNumberScheduled && c.misplaced == counts.NumberMisscheduled && now.Before(c.until) {
		return
	}
	*c = choices{set.Generation, counts.DesiredNumberScheduled, counts.NumberMisscheduled, now.Add(resync), map[string]bool{}}
}

// notChosen are the nodes on which a pool is lacking, and that the driver is not to run on. They are read only where the counts of the
// DaemonSet leave that open, and each once.
func (r *Reconciler) notChosen(ctx context.Context, object *hppv1.HostPathProvisioner, seen *status.Observed) (sets.Set[string], error) {
	set, found := seen.DaemonSets[render.DriverDaemonSet], sets.New[string]()
	if set == nil || set.Status.NumberMisscheduled == 0 && seen.Nodes().Len() <= int(set.Status.DesiredNumberScheduled) {
		return found, nil
	}
	r.choices.reset(set, r.now(), r.resync())
	for name := range seen.Lacking(object) {
		chosen, known := r.choices.isChosen[name]
		if !known {
			node := &corev1.Node{}
			err := r.APIReader.Get(ctx, client.ObjectKey{Name: name}, node)
			if client.IgnoreNotFound(err) != nil {
				return nil, err
			}
			chosen = err == nil && schedule.Chooses(set, node)
			r.choices.isChosen[name] = chosen
		}
		if !chosen {
			found.Insert(name)
		}
	}
	return found, nil
}

// lostAfter is how long a node has to be not ready before a deletion does not wait for it. A kubelet that restarts is back before, and
// Kubernetes evicts pods after this time by default.
const lostAfter = 5 * time.Minute

// A nodeState says of a node that it has an object, that its kubelet answers, and that it has not answered for long.
type nodeState struct{ there, ready, lost bool }

func (c *cluster) state(ctx context.Context, name string) (nodeState, error) {
	node := &corev1.Node{}
	if err := c.api.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return nodeState{}, client.IgnoreNotFound(err)
	}
	s := nodeState{there: true, lost: true}
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			s.ready = condition.Status == corev1.ConditionTrue
			s.lost = !s.ready && c.now().Sub(condition.LastTransitionTime.Time) >= lostAfter
		}
	}
	return s, nil
}

// running are the pods of a kind that have to end, but for those on nodes that are gone or lost, which do not report it.
func (c *cluster) running(ctx context.Context, of func(*corev1.Pod) bool) (waiting []string, err error) {
	pods, err := c.pods(ctx)
	if err != nil {
		return nil, err
	}
	for _, pod := range pods {
		if pod.Spec.NodeName == "" || !of(&pod) {
			continue
		}
		node, err := c.state(ctx, pod.Spec.NodeName)
		if err != nil {
			return nil, err
		}
		if node.there && !node.lost {
			waiting = append(waiting, fmt.Sprintf("pod %s on %s", pod.Name, pod.Spec.NodeName))
		}
	}
	slices.Sort(waiting)
	return waiting, nil
}

// volumes are the PersistentVolumes of the driver and of the pre-CSI provisioner.
func (c *cluster) volumes(ctx context.Context) (found []corev1.PersistentVolume, err error) {
	err = place.EachVolume(ctx, c.api, func(volume *corev1.PersistentVolume) {
		if place.OfDriver(volume) || place.OfLegacyProvisioner(volume) {
			found = append(found, *volume)
		}
	})
	return found, err
}

// snapshots are the VolumeSnapshotContents of the driver in a cluster that has the kind, read page by page: there may be many of other drivers.
func (c *cluster) snapshots(ctx context.Context) (found []unstructured.Unstructured, err error) {
	for next := ""; ; {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(place.SnapshotContent.GroupVersion().WithKind(place.SnapshotContent.Kind + "List"))
		if err := c.api.List(ctx, list, client.Limit(500), client.Continue(next)); err != nil {
			return nil, err
		}
		found = append(found, slices.DeleteFunc(list.Items, func(content unstructured.Unstructured) bool { return !place.SnapshotOfDriver(&content) })...)
		if next = list.GetContinue(); next == "" {
			return found, nil
		}
	}
}

// eachPod reads all pods of the cluster that have not ended, page by page. One that is being deleted has not, as long as it is there: kubelet may have to
// unpublish its volumes.
func (c *cluster) eachPod(ctx context.Context, do func(*corev1.Pod)) error {
	for next := ""; ; {
		list := &corev1.PodList{}
		if err := c.api.List(ctx, list, client.Limit(500), client.Continue(next)); err != nil {
			return err
		}
		for i := range list.Items {
			if pod := &list.Items[i]; !ended(pod) || pod.DeletionTimestamp != nil {
				do(pod)
			}
		}
		if next = list.Continue; next == "" {
			return nil
		}
	}
}

func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

func claimsOf(pod *corev1.Pod) (claims []types.NamespacedName) {
	for i := range pod.Spec.Volumes {
		if claim, has := claimOf(pod, &pod.Spec.Volumes[i]); has {
			claims = append(claims, claim)
		}
	}
	return claims
}

func claimOf(pod *corev1.Pod, volume *corev1.Volume) (claim types.NamespacedName, has bool) {
	switch {
	case volume.PersistentVolumeClaim != nil:
		return types.NamespacedName{Namespace: pod.Namespace, Name: volume.PersistentVolumeClaim.ClaimName}, true
	case volume.Ephemeral != nil:
		return types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name + "-" + volume.Name}, true
	}
	return claim, false
}

// byClaim are pools or paths of the volumes that name a claim. These are several where a claim was made anew and an earlier volume is retained:
// by its name alone it is not known which of them a pod has.
type byClaim map[types.NamespacedName]sets.Set[string]

func (b byClaim) add(claim types.NamespacedName, what string) {
	if b[claim] == nil {
		b[claim] = sets.New[string]()
	}
	b[claim].Insert(what)
}

// poolsOfVolumes are the pools that PersistentVolumes name, by their claims, and the paths of those of other programs.
func (c *cluster) poolsOfVolumes(ctx context.Context) (pools, paths byClaim, err error) {
	pools, paths = byClaim{}, byClaim{}
	err = place.EachVolume(ctx, c.api, func(volume *corev1.PersistentVolume) {
		var claim types.NamespacedName
		if ref := volume.Spec.ClaimRef; ref != nil {
			claim = types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}
		}
		if place.OfDriver(volume) {
			pools.add(claim, volume.Spec.CSI.VolumeAttributes[render.PoolParameter])
		} else if at := origin.Path(volume); at != "" {
			paths.add(claim, at)
		}
	})
	return pools, paths, err
}

// users are the moves, and the pods that count, which use pools on nodes. It does not matter whether their nodes are ready: what runs on one goes
// on. The pool that a volume names says where it was made, and not where its data is: the driver finds it in any. So where the clean-up cannot
// look first, a pod with a volume of the driver may use each pool of its node.
func (c *cluster) users(ctx context.Context, of []leftover, counts func(*corev1.Pod) bool) (map[render.Spot]sets.Set[string], error) {
	users := map[render.Spot]sets.Set[string]{}
	if len(of) == 0 {
		return users, nil
	}
	if err := c.findBlind(ctx, of); err != nil {
		return nil, err
	}
	pools, paths, err := c.poolsOfVolumes(ctx)
	if err != nil {
		return nil, err
	}
	add := func(at render.Spot, user string) {
		if users[at] == nil {
			users[at] = sets.New[string]()
		}
		users[at].Insert(user)
	}
	moves, err := c.moves(ctx)
	if err != nil {
		return nil, err
	}
	usersOf(moves, of, add)
	return users, c.eachPod(ctx, func(pod *corev1.Pod) {
		if !counts(pod) {
			return
		}
		has := poolsOf(pod, pools)
		for i := range of {
			l := &of[i]
			switch {
			case l.Node != pod.Spec.NodeName:
			case has.HasAny(l.Pool, "") || c.hasPathIn(pod, l.Path, paths):
				add(l.spot(), "pod "+named(pod))
			case l.blind && has.Len() > 0 && !c.mounts(pod):
				add(l.spot(), "pod "+named(pod)+" (its volumes may be in this pool)")
			}
		}
	})
}

// findBlind reads the nodes of pools, and marks those pools of which nothing there can say first whether they are used.
func (c *cluster) findBlind(ctx context.Context, of []leftover) error {
	for i := range of {
		l := &of[i]
		if l.Node == "" {
			continue
		}
		node, err := c.state(ctx, l.Node)
		if err != nil {
			return err
		}
		mounters, err := c.mounterPods(ctx, l)
		if err != nil {
			return err
		}
		l.at, l.blind = node, !node.ready || (l.wants() || len(mounters) > 0) && !l.besides(mounters)
	}
	return nil
}

// mounts says whether a pod keeps a pool mounted or unmounts it, also one of the upstream operator. Its claim may be a volume of the driver.
func (c *cluster) mounts(pod *corev1.Pod) bool {
	return pod.Namespace == c.namespace && (ofPool(pod) || pod.Labels[render.UpstreamPoolLabel] != "")
}

// hasPathIn says whether a pod has a pool by its path, or a directory of it, as a hostPath or by a claim. The driver's own pods have all pools so, and
// those that mount pools the path. A path above shows that it is used no more than on any pod that looks at the whole node.
func (c *cluster) hasPathIn(pod *corev1.Pod, pool string, ofClaims byClaim) bool {
	if pod.Namespace == c.namespace && ofDriver(pod) && pod.Labels[render.AppLabel] == render.App {
		return false
	}
	data := render.DataDirectory(hppv1.StoragePool{Path: hppv1.HostDirectory(pool)})
	in := func(at string) bool {
		return origin.Inside(at, data) || path.Clean(at) == path.Clean(pool) && !c.mounts(pod)
	}
	paths, above := pathsOf(pod, ofClaims)
	return slices.ContainsFunc(paths, in) || slices.ContainsFunc(above, func(at string) bool { return origin.Inside(data, at) })
}

// pathsOf are the directories of the node that a pod has as volumes, and what its containers have of them. Of some these have what follows from
// variables: anything below.
func pathsOf(pod *corev1.Pod, ofClaims byClaim) (paths, above []string) {
	for _, v := range pod.Spec.Volumes {
		var of []string
		if v.HostPath != nil {
			of = append(of, v.HostPath.Path)
		} else if claim, has := claimOf(pod, &v); has {
			of = sets.List(ofClaims[claim])
		}
		paths = append(paths, of...)
		for _, m := range mountsOf(pod, v.Name) {
			known, _, varies := strings.Cut(m.SubPathExpr, "$")
			for _, at := range of {
				paths = append(paths, path.Join(at, m.SubPath, known))
				if varies {
					above = append(above, path.Join(at, path.Dir(known)))
				}
			}
		}
	}
	return paths, above
}

// mountsOf are those of a volume of a pod.
func mountsOf(pod *corev1.Pod, volume string) (mounts []corev1.VolumeMount) {
	for _, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for _, m := range container.VolumeMounts {
			if m.Name == volume {
				mounts = append(mounts, m)
			}
		}
	}
	return mounts
}

// poolsOf are the pools that the volumes of a pod are in, with an empty name for one that is not known.
func poolsOf(pod *corev1.Pod, ofClaims byClaim) sets.Set[string] {
	pools := sets.New[string]()
	for _, claim := range claimsOf(pod) {
		pools = pools.Union(ofClaims[claim])
	}
	for _, volume := range pod.Spec.Volumes {
		if volume.CSI != nil && volume.CSI.Driver == render.DriverName {
			pools.Insert(volume.CSI.VolumeAttributes[render.PoolParameter])
		}
	}
	return pools
}

// podsWithVolumes are those on nodes that have a volume of the driver, but for those that keep pools mounted, which end with these.
func (c *cluster) podsWithVolumes(ctx context.Context) (users []string, err error) {
	claims := byClaim{}
	err = place.EachVolume(ctx, c.api, func(volume *corev1.PersistentVolume) {
		if ref := volume.Spec.ClaimRef; ref != nil && place.OfDriver(volume) {
			claims.add(types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}, volume.Spec.CSI.VolumeAttributes[render.PoolParameter])
		}
	})
	if err != nil {
		return nil, fmt.Errorf("look for volumes of the driver: %w", err)
	}
	found := sets.New[string]()
	err = c.eachPod(ctx, func(pod *corev1.Pod) {
		if pod.Spec.NodeName != "" && !c.mounts(pod) && poolsOf(pod, claims).Len() > 0 {
			found.Insert(fmt.Sprintf("pod %s on %s", named(pod), pod.Spec.NodeName))
		}
	})
	if err != nil {
		return nil, fmt.Errorf("look for pods with volumes of the driver: %w", err)
	}
	return sets.List(found), nil
}
