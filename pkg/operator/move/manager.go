package move

import (
	"time"

	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
)

// noDefinition is how long the definition of VolumeMove may be missing: an update of the operator may bring it later, or never.
const noDefinition = 10 * 365 * 24 * time.Hour

// Add registers the reconciler with a manager. One move is looked at at a time, so that two of one claim see each other.
func (r *Reconciler) Add(manager ctrl.Manager) error {
	c, err := controller.New("volumemove", manager, controller.Options{
		Reconciler: r, MaxConcurrentReconciles: 1, CacheSyncTimeout: noDefinition,
		RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](poll, idle),
	})
	if err != nil {
		return err
	}
	return c.Watch(source.Kind(manager.GetCache(), &v1alpha1.VolumeMove{}, &handler.TypedEnqueueRequestForObject[*v1alpha1.VolumeMove]{}))
}
