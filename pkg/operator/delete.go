package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/apply"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
)

// poll is how often nodes are checked while a deletion waits for pods: no watch shows whether a node is
// ready.
const poll = 10 * time.Second

// delete removes what was deployed, and then lets the object go. Claims, StorageClasses and all data stay. Nothing waits
// for a node that is gone.
func (r *Reconciler) delete(ctx context.Context, object *hppv1.HostPathProvisioner) (ctrl.Result, error) {
	a := r.applier(ctx, object)
	waiting, err := r.removeWorkloads(ctx, a, object)
	if len(waiting) > 0 || err != nil {
		return ctrl.Result{RequeueAfter: poll}, errors.Join(err, r.reportDeletion(ctx, object, waiting, err))
	}
	if err := a.Prune(ctx, r.Config.Namespace, r.prunable(), nil); err != nil {
		return ctrl.Result{}, errors.Join(err, r.reportDeletion(ctx, object, nil, err))
	}
	ready.Set(noObject)
	return ctrl.Result{}, r.release(ctx, object)
}

func (r *Reconciler) reportDeletion(ctx context.Context, object *hppv1.HostPathProvisioner, waiting []string, problems error) error {
	if problems != nil {
		waiting = append(slices.Clone(waiting), problems.Error())
	}
	volumes, err := r.volumes(ctx)
	if err != nil {
		return err
	}
	legacy := 0
	for i := range volumes {
		if place.OfLegacyProvisioner(&volumes[i]) {
			legacy++
		}
	}
	return r.update(ctx, object, status.Deleting(object, r.Config.Version, waiting, len(volumes)-legacy, legacy))
}

// removeWorkloads unmounts the pools on claims and then removes what has pods, as long as the pods have their rights. It returns what it
// waits for. The driver goes last: without it no pod that uses a volume can end, and a claim of a pool may be a volume of the driver itself.
func (r *Reconciler) removeWorkloads(ctx context.Context, a *apply.Applier, object *hppv1.HostPathProvisioner) (waiting []string, err error) {
	if waiting, err = r.removePools(ctx, object); len(waiting) > 0 || err != nil {
		return waiting, err
	}
	workloads := []schema.GroupVersionKind{{Group: "apps", Version: "v1", Kind: "DaemonSet"}}
	if err := a.Prune(ctx, r.Config.Namespace, workloads, nil); err != nil {
		return nil, err
	}
	return r.running(ctx, ofDriver)
}

// removePools unmounts the pools on claims: the driver serves the others, and unpublishes what is left. As long as pods use such
// pools everything stays deployed.
func (r *Reconciler) removePools(ctx context.Context, object *hppv1.HostPathProvisioner) (waiting []string, err error) {
	left, _, err := r.leftovers(ctx, nil)
	if err != nil {
		return nil, err
	}
	if len(left) == 0 {
		// What has just unmounted may itself have had a volume of the driver.
		return r.running(ctx, ofPool)
	}
	// What keeps a pool mounted ends with it, also where its own claim is in another pool.
	users, err := r.users(ctx, left, func(pod *corev1.Pod) bool { return pod.Namespace != r.Config.Namespace || !ofPool(pod) })
	if err != nil {
		return nil, err
	}
	for at, pods := range users {
		waiting = append(waiting, fmt.Sprintf("pool %s on %s: it is used by %s", at.pool, at.node, few(pods)))
	}
	slices.Sort(waiting)
	shown := object
	if len(waiting) == 0 {
		shown = withoutClaims(object)
	}
	wanted, err := r.deploy(ctx, shown)
	waiting = append(waiting, wanted.leaving...)
	if len(waiting) > 0 || err != nil {
		return waiting, err
	}
	return r.running(ctx, ofPool)
}

// withoutClaims is an object without its pools on claims, of which it knows where they were.
func withoutClaims(object *hppv1.HostPathProvisioner) *hppv1.HostPathProvisioner {
	without := object.DeepCopy()
	without.Status.MountedPools = places(object)
	without.Spec.StoragePools = slices.DeleteFunc(without.Spec.StoragePools, func(p hppv1.StoragePool) bool { return p.PVCTemplate != nil })
	return without
}

// running are the pods of a kind that have to end, but for those on nodes that are gone or lost, which do not report it.
func (r *Reconciler) running(ctx context.Context, of func(*corev1.Pod) bool) ([]string, error) {
	pods := &corev1.PodList{}
	if err := r.Client.List(ctx, pods, client.InNamespace(r.Config.Namespace), client.MatchingLabels{render.AppLabel: render.App}); err != nil {
		return nil, err
	}
	var waiting []string
	for _, pod := range pods.Items {
		if pod.Spec.NodeName == "" || !of(&pod) {
			continue
		}
		node, err := r.state(ctx, pod.Spec.NodeName)
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

// ownedPod says whether a pod is of the driver or keeps a pool mounted, and not the operator's own.
func ownedPod(pod *corev1.Pod) bool {
	return ofDriver(pod) || ofPool(pod) && !ofJob(pod)
}

// ofPool says whether a pod keeps a pool mounted or unmounts it.
func ofPool(pod *corev1.Pod) bool { return render.PoolOf(pod.Labels) != "" }

func ofDriver(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "DaemonSet" })
}

// lostAfter is how long a node has to be not ready before a deletion does not wait for it. A kubelet that restarts is back before, and
// Kubernetes evicts pods after this time by default.
const lostAfter = 5 * time.Minute

// A nodeState is what is known of a node.
type nodeState struct {
	// there says that it has an object, ready that its kubelet answers, and lost that it has not answered for long.
	there, ready, lost bool
}

// state asks the API server about a node.
func (r *Reconciler) state(ctx context.Context, name string) (nodeState, error) {
	node := &corev1.Node{}
	if err := r.APIReader.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return nodeState{}, client.IgnoreNotFound(err)
	}
	s := nodeState{there: true, lost: true}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			s.ready = c.Status == corev1.ConditionTrue
			s.lost = !s.ready && r.now().Sub(c.LastTransitionTime.Time) >= lostAfter
		}
	}
	return s, nil
}

// volumes are the PersistentVolumes of the driver and of the pre-CSI provisioner, read page by page: there may be many of others.
func (r *Reconciler) volumes(ctx context.Context) ([]corev1.PersistentVolume, error) {
	var found []corev1.PersistentVolume
	list := &corev1.PersistentVolumeList{}
	for {
		if err := r.APIReader.List(ctx, list, client.Limit(500), client.Continue(list.Continue)); err != nil {
			return nil, err
		}
		for _, volume := range list.Items {
			if place.OfDriver(&volume) || place.OfLegacyProvisioner(&volume) {
				found = append(found, volume)
			}
		}
		if list.Continue == "" {
			return found, nil
		}
	}
}
