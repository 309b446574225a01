package operator

import (
	"context"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
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
// for a node that is gone or not ready.
func (r *Reconciler) delete(ctx context.Context, object *hppv1.HostPathProvisioner) (ctrl.Result, error) {
	a := r.applier(ctx, object)
	waiting, err := r.removeDriver(ctx, a, object)
	if err != nil {
		return ctrl.Result{}, err
	}
	if len(waiting) == 0 {
		facts, err := r.facts(ctx)
		if err != nil {
			return ctrl.Result{}, err
		}
		left, err := r.mountersThere(ctx)
		if err != nil {
			return ctrl.Result{}, err
		}
		if waiting, err = r.cleanUp(ctx, a, r.manifests.For(r.Config, facts, object), left); err != nil {
			return ctrl.Result{}, err
		}
	}
	if len(waiting) > 0 {
		users, err := r.volumes(ctx)
		if err != nil {
			return ctrl.Result{}, err
		}
		legacy := 0
		for i := range users {
			if place.OfLegacyProvisioner(&users[i]) {
				legacy++
			}
		}
		return ctrl.Result{RequeueAfter: poll}, r.update(ctx, object, status.Deleting(object, r.Config.Version, waiting, len(users)-legacy, legacy))
	}
	if err := a.Prune(ctx, r.Config.Namespace, r.prunable(), nil); err != nil {
		return ctrl.Result{}, err
	}
	ready.Set(noObject)
	return ctrl.Result{}, r.release(ctx, object)
}

// removeDriver removes what has pods, as long as the pods have their rights. It returns what it waits for: without the driver no
// volume of a pool is unpublished any more, and while one is published the pool cannot be unmounted.
func (r *Reconciler) removeDriver(ctx context.Context, a *apply.Applier, object *hppv1.HostPathProvisioner) (waiting []string, err error) {
	driver, err := get[appsv1.DaemonSet](ctx, r, render.DriverDaemonSet)
	if err != nil {
		return nil, err
	}
	if driver != nil && driver.DeletionTimestamp == nil {
		if waiting, err = r.poolUsers(ctx, object); len(waiting) > 0 || err != nil {
			return waiting, err
		}
	}
	workloads := []schema.GroupVersionKind{{Group: "apps", Version: "v1", Kind: "DaemonSet"}}
	if err := a.Prune(ctx, r.Config.Namespace, workloads, nil); err != nil {
		return nil, err
	}
	return r.running(ctx)
}

// running are the pods that have to end, but for those on nodes that do not report it.
func (r *Reconciler) running(ctx context.Context) ([]string, error) {
	pods := &corev1.PodList{}
	if err := r.Client.List(ctx, pods, client.InNamespace(r.Config.Namespace), client.MatchingLabels{render.AppLabel: render.App}); err != nil {
		return nil, err
	}
	var waiting []string
	for _, pod := range pods.Items {
		if pod.Spec.NodeName == "" || !ofDriver(&pod) {
			continue
		}
		_, answers, err := r.answers(ctx, pod.Spec.NodeName)
		if err != nil {
			return nil, err
		}
		if answers {
			waiting = append(waiting, fmt.Sprintf("pod %s on %s", pod.Name, pod.Spec.NodeName))
		}
	}
	slices.Sort(waiting)
	return waiting, nil
}

// ownedPod says whether a pod is of the driver or keeps a pool mounted, and not the operator's own.
func ownedPod(pod *corev1.Pod) bool {
	return ofDriver(pod) || render.PoolOf(pod.Labels) != "" && !ofJob(pod)
}

func ofDriver(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "DaemonSet" })
}

// answers says whether a node is there, and whether it is ready.
func (r *Reconciler) answers(ctx context.Context, name string) (there, ready bool, err error) {
	node := &corev1.Node{}
	if err := r.APIReader.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return false, false, client.IgnoreNotFound(err)
	}
	return true, slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	}), nil
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
