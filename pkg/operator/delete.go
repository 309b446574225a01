package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
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
// for a node that is gone, but for its pods that use a pool: Kubernetes removes these soon.
func (r *Reconciler) delete(ctx context.Context, object *hppv1.HostPathProvisioner) (ctrl.Result, error) {
	if err := r.remember(ctx, object); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	a := r.applier(ctx, object)
	waiting, err := r.removeWorkloads(ctx, a, object)
	if len(waiting) > 0 || err != nil {
		return ctrl.Result{RequeueAfter: poll}, errors.Join(err, r.reportDeletion(ctx, object, waiting, err))
	}
	if err := a.Prune(ctx, r.Config.Namespace, r.Optional.prunable(), nil); err != nil {
		return ctrl.Result{}, errors.Join(err, r.reportDeletion(ctx, object, nil, err))
	}
	ready.Set(noObject)
	return ctrl.Result{}, r.release(ctx, object)
}

func (r *Reconciler) reportDeletion(ctx context.Context, object *hppv1.HostPathProvisioner, waiting []string, problems error) error {
	if problems != nil {
		waiting = append(slices.Clone(waiting), problems.Error())
	}
	volumes, err := r.cluster().volumes(ctx)
	if err != nil {
		return err
	}
	ofDriver := slices.DeleteFunc(slices.Clone(volumes), func(v corev1.PersistentVolume) bool { return place.OfLegacyProvisioner(&v) })
	deleting := status.Deleting(object, r.Config.Version, waiting, len(ofDriver), len(volumes)-len(ofDriver))
	measure(deleting)
	return r.reporter().update(ctx, object, deleting)
}

// removeWorkloads waits for moves, unmounts the pools on claims and then removes what has pods, as long as the pods have their rights. It returns what it
// waits for. The driver goes last: without it no pod that uses a volume can end, and a claim of a pool may be a volume of the driver itself.
func (r *Reconciler) removeWorkloads(ctx context.Context, a *apply.Applier, object *hppv1.HostPathProvisioner) (waiting []string, err error) {
	if waiting, err = r.awaitMoves(ctx, object); len(waiting) > 0 || err != nil {
		return waiting, err
	}
	if waiting, err = r.removePools(ctx, object); len(waiting) > 0 || err != nil {
		return waiting, err
	}
	if object.Annotations[podsAnnotation] != "" {
		if waiting, err = r.awaitPods(ctx, object); len(waiting) > 0 || err != nil {
			return waiting, err
		}
	}
	workloads := []schema.GroupVersionKind{{Group: "apps", Version: "v1", Kind: "DaemonSet"}}
	if err := a.Prune(ctx, r.Config.Namespace, workloads, nil); err != nil {
		return nil, err
	}
	return r.cluster().running(ctx, ofDriver)
}

// awaitPods says which pods with volumes a deletion waits for. The driver is deployed again for one that was published after it was looked for pods,
// and before the pod of the driver on its node had ended.
func (r *Reconciler) awaitPods(ctx context.Context, object *hppv1.HostPathProvisioner) (waiting []string, err error) {
	waiting, err = r.cluster().podsWithVolumes(ctx)
	if len(waiting) == 0 || err != nil {
		return nil, err
	}
	driver, err := get[appsv1.DaemonSet](ctx, r.cluster(), render.DriverDaemonSet)
	if err == nil && driver == nil {
		_, err = r.deploy(ctx, withoutPools(object, func(p *hppv1.StoragePool) bool { return p.PVCTemplate != nil }))
	}
	return waiting, err
}

// removePools unmounts the pools on claims: the driver serves the others, and unpublishes what is left. As long as pods use such
// pools everything stays deployed.
func (r *Reconciler) removePools(ctx context.Context, object *hppv1.HostPathProvisioner) (waiting []string, err error) {
	c := r.cluster()
	mounted, err := c.mayBeMounted(ctx, object)
	if err != nil {
		return nil, err
	}
	left, _ := leftovers(mounted, nil)
	if len(left) == 0 {
		// What has just unmounted may itself have had a volume of the driver.
		return c.running(ctx, ofPool)
	}
	// What keeps a pool mounted ends with it, also where its own claim is in another pool.
	users, err := c.users(ctx, left, func(pod *corev1.Pod) bool { return !c.mounts(pod) })
	if err != nil {
		return nil, err
	}
	for at, pods := range users {
		waiting = append(waiting, fmt.Sprintf("pool %s on %s: it is used by %s", at.Pool, at.Node, status.Some(sets.List(pods))))
	}
	slices.Sort(waiting)
	shown := withoutPools(object, (*hppv1.StoragePool).SharesDevice)
	if len(waiting) == 0 {
		shown = withoutPools(object, func(p *hppv1.StoragePool) bool { return p.PVCTemplate != nil })
	}
	wanted, err := r.deploy(ctx, shown)
	waiting = append(waiting, wanted.leaving...)
	if len(waiting) > 0 || err != nil {
		return waiting, err
	}
	return c.running(ctx, ofPool)
}

// withoutPools is an object without some of its pools on claims, of which it knows where they were.
func withoutPools(object *hppv1.HostPathProvisioner, some func(*hppv1.StoragePool) bool) *hppv1.HostPathProvisioner {
	without := object.DeepCopy()
	without.Status.MountedPools = places(object)
	without.Spec.StoragePools = slices.DeleteFunc(without.Spec.StoragePools, func(p hppv1.StoragePool) bool { return some(&p) })
	return without
}
