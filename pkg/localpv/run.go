package localpv

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// Options are what the provisioner of a node is run with.
type Options struct {
	Node             string
	Namespace        string
	DefaultConfigMap string
	MetricsAddress   string
	RecordDir        string
	PollingInterval  time.Duration
	// NewDeviceDelay is devices.Options.Settle.
	NewDeviceDelay time.Duration
	// NestedNode says that the node is a container.
	NestedNode bool
}

// Run keeps the volumes of a node until the context ends.
func Run(ctx context.Context, api *rest.Config, o Options) (err error) {
	records, err := devices.OpenRecords(o.RecordDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, records.Close()) }()
	release, err := records.Own(ctx, func() {
		ctrl.Log.Info("Waiting: another local-pv-provisioner works on this node. If it is of another namespace, remove one of the two", "records", o.RecordDir)
	})
	if err != nil {
		return err
	}
	defer release()
	c := &controller{Options: o, metrics: newMetrics(ctrlmetrics.Registry, o.Node), log: ctrl.Log.WithValues("node", o.Node),
		reported: make(map[string]string), annotated: make(map[string]time.Time)}
	manager, err := ctrl.NewManager(api, ctrl.Options{
		Cache:   cache.Options{ByObject: ownObjects(o)},
		Metrics: server.Options{BindAddress: o.MetricsAddress, ExtraHandlers: map[string]http.Handler{readyPath: c}},
		Logger:  c.log,
		// Metrics and names are of the process; tests have several in one.
		Controller: ctrlconfig.Controller{SkipNameValidation: new(true)},
	})
	if err != nil {
		return fmt.Errorf("connect to the API server: %w", err)
	}
	changes := make(chan event.GenericEvent, 1)
	changed := func() {
		select {
		case changes <- event.GenericEvent{Object: nodeMetadata(o.Node)}:
		default: // a pass is about to run, and finds it
		}
	}
	c.Client, c.fresh, c.events = manager.GetClient(), manager.GetAPIReader(), manager.GetEventRecorder("local-pv-provisioner")
	c.agent = devices.NewAgent(devices.Options{Node: o.Node, Records: records, API: c, Log: c.log, Changed: changed, View: blockdev.View{Nested: o.NestedNode}, Settle: o.NewDeviceDelay,
		Wiped: func(bytes int64) { c.metrics.wiped.Add(float64(bytes)) }})
	defer c.agent.Close()
	if c.watcher, err = newWatcher(c.log, changed); err != nil {
		return err
	}
	if err := errors.Join(manager.Add(c.watcher), c.watch(manager, changes)); err != nil {
		return err
	}
	return manager.Start(ctx)
}

// ownObjects limits what is watched to what concerns the node.
func ownObjects(o Options) map[client.Object]cache.ByObject {
	return map[client.Object]cache.ByObject{
		&corev1.PersistentVolume{}: {Label: labels.SelectorFromSet(labels.Set{legacyNodeLabel: o.Node})},
		nodeMetadata(o.Node):       {Field: fields.OneTermEqualSelector(metav1.ObjectNameField, o.Node)},
		&corev1.ConfigMap{}:        {Namespaces: map[string]cache.Config{o.Namespace: {}}},
	}
}

// nodeMetadata is a node without its specification and status, which change all the time.
func nodeMetadata(name string) *metav1.PartialObjectMetadata {
	node := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
	node.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	return node
}

func (c *controller) watch(manager ctrl.Manager, changes <-chan event.GenericEvent) error {
	pass := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: client.ObjectKey{Name: c.Node}}}
	})
	meaningful := builder.WithPredicates(predicate.Or(predicate.AnnotationChangedPredicate{}, predicate.LabelChangedPredicate{}))
	return ctrl.NewControllerManagedBy(manager).Named("devices").
		Watches(&corev1.PersistentVolume{}, pass).
		WatchesMetadata(nodeMetadata(c.Node), pass, meaningful).
		Watches(&corev1.ConfigMap{}, pass).
		WatchesRawSource(source.Channel(changes, pass)).
		Complete(c)
}
