package move

import (
	"context"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	apiwait "k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
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

// lateness is how often pods are looked for that were made late.
const lateness = time.Minute

// moveOfObject is the VolumeMove that an object was made for.
func moveOfObject(_ context.Context, object *metav1.PartialObjectMetadata) []reconcile.Request {
	m := recalled(object)
	if m == nil {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(m)}}
}

// AddCache adds what a manager keeps in memory for Add, beside VolumeMoves.
func AddCache(to *cache.Options) error {
	made, err := labels.Parse(moveLabel)
	to.ByObject[&networkingv1.NetworkPolicy{}] = cache.ByObject{Label: made}
	return err
}

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
	// Of a VolumeMove that was removed by force while no operator ran, these are heard of.
	policies := &metav1.PartialObjectMetadata{}
	policies.SetGroupVersionKind(networkingv1.SchemeGroupVersion.WithKind("NetworkPolicy"))
	if err := c.Watch(source.Kind(manager.GetCache(), policies, handler.TypedEnqueueRequestsFromMapFunc(moveOfObject))); err != nil {
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

// lookForForsaken has moves be ended of which there are but pods, of which nothing is heard: an operator that has lost its lease may make one late.
func (r *Reconciler) lookForForsaken(ctx context.Context, found func(m reconcile.Request)) {
	all, err := apiServer{reader: r.APIReader}.forsaken(ctx, r.DriverNamespace)
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "Failed to look for moves whose VolumeMove was removed by force")
	}
	for _, m := range all {
		found(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(m)})
	}
}
