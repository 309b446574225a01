package provisioner

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller/metrics"

	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

const (
	// resync is when claims and PersistentVolumes are gone through again although nothing changed.
	resync = 15 * time.Minute
	// retryFirst and retryLast bound the wait before a claim or PersistentVolume that failed is tried again.
	retryFirst, retryLast = 2 * time.Second, 10 * time.Minute
)

// An Instance is a Provisioner with its controller, informers and metrics.
type Instance struct {
	provisioner *Provisioner
	factory     informers.SharedInformerFactory
	volumes     cache.SharedIndexInformer
	controller  *controller.ProvisionController
	workers     sync.WaitGroup
	metrics     metrics.Metrics
	nodes       remembered
}

// New makes an instance that serves once it is run. The context carries the log.
func New(ctx context.Context, config Config, pool Pool, client kubernetes.Interface) (*Instance, error) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, resync, informers.WithTransform(withoutManagedFields))
	claims := factory.Core().V1().PersistentVolumeClaims()
	classes := factory.Storage().V1().StorageClasses()
	volumes := ownVolumes(config, client)
	log := logr.FromContextOrDiscard(ctx)
	i := &Instance{
		provisioner: &Provisioner{
			config:  config,
			pool:    pool,
			client:  client,
			events:  reporter{client, corev1.EventSource{Component: config.Name(), Host: config.Node}, log},
			volumes: volumes.GetIndexer(),
			claims:  claims.Lister(),
			classes: classes.Lister(),
		},
		factory: factory,
		volumes: volumes,
		metrics: metrics.New("hostpath_provisioner"),
	}
	if err := i.provisioner.bound.follow(volumes); err != nil {
		return nil, fmt.Errorf("follow the PersistentVolumes: %w", err)
	}
	retry := func() workqueue.TypedRateLimiter[string] {
		return workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryFirst, retryLast)
	}
	i.controller = controller.NewProvisionController(ctx, client, config.Name(), i.provisioner,
		controller.LeaderElection(false),
		controller.ClaimsInformer(claims.Informer()),
		controller.VolumesInformer(volumes),
		controller.ClassesInformer(classes.Informer()),
		controller.ResyncPeriod(resync),
		controller.RateLimiter(retry()),
		controller.FailedProvisionThreshold(0),
		controller.FailedDeleteThreshold(0),
		// Saved until that succeeds: a directory is not removed because the API server is away.
		controller.CreateProvisionedPVLimiter(retry()),
		// A PersistentVolume that is deleted by hand stays until its directory is removed.
		controller.AddFinalizer(true),
		controller.MetricsInstance(i.metrics),
	)
	i.controller.ControllerWaitGroup(&i.workers)
	return i, nil
}

// Collectors are the metrics of claims and PersistentVolumes.
func (i *Instance) Collectors() []prometheus.Collector {
	m := i.metrics
	return []prometheus.Collector{
		m.PersistentVolumeClaimProvisionTotal, m.PersistentVolumeClaimProvisionFailedTotal, m.PersistentVolumeClaimProvisionDurationSeconds,
		m.PersistentVolumeDeleteTotal, m.PersistentVolumeDeleteFailedTotal, m.PersistentVolumeDeleteDurationSeconds,
	}
}

// Run serves until ctx ends, and finishes what is under way.
func (i *Instance) Run(ctx context.Context) {
	var background sync.WaitGroup
	defer i.factory.Shutdown()
	defer background.Wait()
	_ = i.provisioner.findUpstream(ctx) // Ready says it
	i.factory.Start(ctx.Done())
	background.Go(func() { i.volumes.RunWithContext(ctx) })
	background.Go(func() { i.watch(ctx) })
	i.controller.Run(ctx)
	i.workers.Wait()
}

// Ready says why claims are not served; nil if they are.
func (i *Instance) Ready(ctx context.Context) error {
	if !i.synced() {
		return errors.New("the claims and PersistentVolumes of the cluster are not read yet")
	}
	return errors.Join(i.nodes.ask(ctx, i.provisioner.refuseOtherNodes), i.provisioner.refuseUpstream())
}

// remembered is the answer of the API server to a question that any client of the network can have asked: it is asked once in a while,
// however many there are, and whether they wait or not.
type remembered struct {
	mu     sync.Mutex
	at     time.Time
	answer error
}

// rememberFor is less than the time between two probes of kubelet.
const rememberFor = 3 * time.Second

func (r *remembered) ask(ctx context.Context, question func(context.Context) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.at) > rememberFor {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rememberFor)
		defer cancel()
		r.answer, r.at = question(ctx), time.Now()
	}
	return r.answer
}

// synced reports whether all claims, classes and PersistentVolumes have been read once.
func (i *Instance) synced() bool {
	return i.volumes.HasSynced() && i.factory.Core().V1().PersistentVolumeClaims().Informer().HasSynced() && i.factory.Storage().V1().StorageClasses().Informer().HasSynced()
}

// ownVolumes informs of the PersistentVolumes that this instance has to do with, and of those that name something in its
// directory without having been made by a provisioner. Those of other nodes are not kept: each instance would have all of them
// in memory, and add its finalizer to them.
func ownVolumes(config Config, client kubernetes.Interface) cache.SharedIndexInformer {
	api := client.CoreV1().PersistentVolumes()
	source := cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list, err := api.List(ctx, options)
			if err != nil {
				return nil, err
			}
			kept := list.Items[:0]
			for _, pv := range list.Items {
				if config.keeps(&pv) {
					kept = append(kept, pv)
				}
			}
			list.Items = kept
			return list, nil
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			w, err := api.Watch(ctx, options)
			if err != nil {
				return nil, err
			}
			return watch.Filter(w, config.filterEvent), nil
		},
	}, client)
	informer := cache.NewSharedIndexInformer(source, &corev1.PersistentVolume{}, resync, cache.Indexers{byDirectory: config.directoryOf})
	if err := informer.SetTransform(withoutManagedFields); err != nil {
		panic(fmt.Sprintf("an informer that was just made has been started: %v", err))
	}
	return informer
}

// keeps reports whether a PersistentVolume is this instance's own, of no known node, or one of something in its directory, unless annotations and
// affinity agree on another node.
func (c Config) keeps(pv *corev1.PersistentVolume) bool {
	if c.ofOtherInstance(pv) {
		name, _ := origin.Node(pv) // ofOtherInstance has asked
		return c.childOf(pv) != "" && !origin.Only(pv, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	return pv.Annotations[origin.ProvisionedBy] == c.Name() || c.childOf(pv) != ""
}

// byDirectory is the index of PersistentVolumes by the directory in PV_DIR that they name, or something in it.
const byDirectory = "directory"

func (c Config) directoryOf(object any) ([]string, error) {
	if pv, ok := object.(*corev1.PersistentVolume); ok && c.childOf(pv) != "" {
		return []string{c.childOf(pv)}, nil
	}
	return nil, nil
}

// childOf is the directory in PV_DIR that a PersistentVolume names, or something in it; empty if it names something else.
func (c Config) childOf(pv *corev1.PersistentVolume) string {
	at := origin.Path(pv)
	if at == "" || !origin.Inside(at, c.Path) {
		return ""
	}
	child, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(path.Clean(at), path.Clean(c.Path)), "/"), "/")
	return child
}

// filterEvent takes a PersistentVolume that is not kept as deleted: it may have been kept before.
func (c Config) filterEvent(in watch.Event) (out watch.Event, keep bool) {
	pv, ok := in.Object.(*corev1.PersistentVolume)
	if !ok || in.Type == watch.Bookmark || c.keeps(pv) {
		return in, true
	}
	in.Type = watch.Deleted
	return in, true
}

// withoutManagedFields drops what makes half of an object and is never read.
func withoutManagedFields(object any) (any, error) {
	if o, ok := object.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return object, nil
}
