package operator

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	movev1 "kubevirt.io/hostpath-provisioner/api/v1alpha1"
	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// LeaderElection is the name of the Lease that the one operator at work holds.
const LeaderElection = "hostpath-provisioner-operator-lock"

// Scheme has the kinds that the operator has types of.
func Scheme() (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		return nil, err
	}
	return scheme, errors.Join(hppv1.AddToScheme(scheme), movev1.AddToScheme(scheme))
}

// CacheOptions keep in memory what belongs to the operator, and no more of a large cluster than the names of its nodes.
func CacheOptions(namespace string) (cache.Options, error) {
	ofPools, err := labels.Parse(render.PoolLabel)
	if err != nil {
		return cache.Options{}, err
	}
	everything := cache.ByObject{Label: labels.Everything()}
	return cache.Options{
		DefaultNamespaces:    map[string]cache.Config{namespace: {}},
		DefaultLabelSelector: labels.SelectorFromSet(render.Owned),
		ByObject: map[client.Object]cache.ByObject{
			&hppv1.HostPathProvisioner{}: everything,
			&movev1.VolumeMove{}:         {Label: labels.Everything(), Namespaces: map[string]cache.Config{cache.AllNamespaces: {}}},
			&corev1.Node{}:               everything,
			// By these it is known where the driver serves a pool.
			&storagev1.StorageClass{}:       everything,
			&storagev1.CSIStorageCapacity{}: everything,
			&corev1.Pod{}:                   {Label: labels.SelectorFromSet(labels.Set{render.AppLabel: render.App})},
			// Those of the upstream operator have no other label.
			&corev1.PersistentVolumeClaim{}: {Label: ofPools},
		},
	}, nil
}

// retries has what failed tried again soon, and at least as often as what is waited for: an error that lasts must not keep the rest from
// being looked at.
func retries() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](5*time.Millisecond, poll)
}

func empty(kind schema.GroupVersionKind) *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(kind)
	return object
}

// Add registers the reconciler with a manager, and watches everything that it reads.
func (r *Reconciler) Add(manager ctrl.Manager) error {
	var err error
	if r.manifests, err = render.Load(); err != nil {
		return err
	}
	c, err := controller.New("hostpathprovisioner", manager, controller.Options{Reconciler: r, MaxConcurrentReconciles: 1, RateLimiter: retries()})
	if err != nil {
		return err
	}
	watch := func(object client.Object, predicates ...predicate.Predicate) error {
		return c.Watch(source.Kind(manager.GetCache(), object, handler.EnqueueRequestsFromMapFunc(r.everyObject), predicates...))
	}
	if err := c.Watch(source.Kind(manager.GetCache(), &hppv1.HostPathProvisioner{}, handler.TypedEnqueueRequestsFromMapFunc(
		func(ctx context.Context, _ *hppv1.HostPathProvisioner) []reconcile.Request {
			return r.everyObject(ctx, nil)
		}))); err != nil {
		return err
	}
	nodes := &metav1.PartialObjectMetadata{}
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	// A change of a node shows in its pods too.
	comesOrGoes := predicate.Funcs{UpdateFunc: func(event.UpdateEvent) bool { return false }}
	if err := errors.Join(watch(nodes, comesOrGoes), watch(&corev1.Pod{}), watch(&corev1.PersistentVolumeClaim{}), watch(empty(storageClassKind)), watch(empty(capacityKind), servesElsewise())); err != nil {
		return err
	}
	for _, kind := range ownedKinds {
		if err := watch(empty(kind)); err != nil {
			return fmt.Errorf("watch %s: %w", kind.Kind, err)
		}
	}
	if err := c.Watch(source.Channel(r.TLS.changed, handler.EnqueueRequestsFromMapFunc(r.everyObject))); err != nil {
		return err
	}
	api, err := discovery.NewDiscoveryClientForConfigAndClient(manager.GetConfig(), manager.GetHTTPClient())
	if err != nil {
		return err
	}
	profile := &follower{TLSPolicy: r.TLS, manager: manager, resync: r.resync(), turn: make(chan struct{}, 1)}
	// The first reconciliation asks: an API server that cannot answer yet does not end the program.
	r.kinds.ask = func(ctx context.Context) error {
		_, err := profile.follow(ctx)
		return errors.Join(err, r.Optional.discover(
			func(kind schema.GroupVersionKind) (bool, error) { return served(api, kind) },
			func(kind schema.GroupVersionKind) error { return watch(empty(kind)) },
			func(kind schema.GroupVersionKind) error { return manager.GetCache().RemoveInformer(ctx, empty(kind)) },
		))
	}
	return manager.Add(profile)
}

// everyObject are requests for all HostPathProvisioners there are, which is one as a rule: what happens to any object may
// matter for it.
func (r *Reconciler) everyObject(ctx context.Context, _ client.Object) []reconcile.Request {
	all := &hppv1.HostPathProvisionerList{}
	if err := r.Client.List(ctx, all); err != nil {
		return nil
	}
	var requests []reconcile.Request
	for _, object := range all.Items {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&object)})
	}
	return requests
}

// ClientOptions have reads of all kinds come from the caches, also of those that are not compiled in.
func ClientOptions() client.Options {
	return client.Options{Cache: &client.CacheOptions{Unstructured: true}}
}
