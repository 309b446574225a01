package move

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
	apiwait "k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	ctrlevent "sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	ctrlmanager "sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
)

// noDefinition is how long the definition of VolumeMove may be missing: an update of the operator may bring it later, or never.
const noDefinition = 10 * 365 * 24 * time.Hour

// lateness is how often objects are looked for that were made late, or whose VolumeMove was removed by force while no operator ran.
const lateness = time.Minute

// Add registers the reconciler with a manager. One move is looked at at a time, so that two of one claim see each other.
func (r *Reconciler) Add(manager ctrl.Manager) error {
	c, err := controller.New("volumemove", manager, controller.Options{
		Reconciler: r, MaxConcurrentReconciles: 1, CacheSyncTimeout: noDefinition,
		RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](poll, idle),
	})
	if err != nil {
		return err
	}
	if err := c.Watch(source.Kind(manager.GetCache(), &v1alpha1.VolumeMove{}, &handler.TypedEnqueueRequestForObject[*v1alpha1.VolumeMove]{})); err != nil {
		return err
	}
	late := make(chan ctrlevent.TypedGenericEvent[reconcile.Request])
	found := func(ctx context.Context, m reconcile.Request) {
		select {
		case late <- ctrlevent.TypedGenericEvent[reconcile.Request]{Object: m}:
		case <-ctx.Done():
		}
	}
	if err := manager.Add(ctrlmanager.RunnableFunc(func(ctx context.Context) error {
		apiwait.UntilWithContext(ctx, func(ctx context.Context) {
			r.lookForForsaken(ctx, func(m reconcile.Request) { found(ctx, m) })
		}, lateness)
		return nil
	})); err != nil {
		return err
	}
	return c.Watch(source.Channel(late, handler.TypedFuncs[reconcile.Request, reconcile.Request]{
		GenericFunc: func(_ context.Context, e ctrlevent.TypedGenericEvent[reconcile.Request], queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
			queue.Add(e.Object)
		},
	}))
}

// lookForForsaken has moves be ended of which there are but objects, of which nothing is heard: an operator that has lost its lease may make one
// late. Each is asked for by its uid: there may be another one of its name.
func (r *Reconciler) lookForForsaken(ctx context.Context, found func(m reconcile.Request)) {
	all, err := apiServer{reader: r.APIReader}.forsaken(ctx, r.DriverNamespace)
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "Failed to look for what is left of earlier VolumeMoves")
	}
	for _, m := range all {
		found(reconcile.Request{NamespacedName: types.NamespacedName{Name: string(m.UID)}})
	}
}
