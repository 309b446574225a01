package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/apply"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
)

// longestResync is how often what no watch shows is checked: nodes that are gone, and which kinds the cluster has.
// Such a check only reads, but for volumes of nodes that are gone.
const longestResync = 5 * time.Minute

// accountAnnotation of a pod has the UID of the ServiceAccount that its token is for.
const accountAnnotation = "hostpathprovisioner.kubevirt.io/account"

// A Reconciler brings a cluster to what its HostPathProvisioner asks for.
type Reconciler struct {
	// Client reads from the caches of the manager, and writes.
	Client client.Client
	// APIReader reads from the API server what is not worth a cache.
	APIReader client.Reader
	Recorder  events.EventRecorder
	Config    render.Config
	// TLS is what the driver's metrics shall accept.
	TLS *TLSPolicy
	// Optional are the kinds which not every cluster has, of those in optionalKinds.
	Optional *OptionalKinds

	// GoneAfter is how long a node has to be gone before it counts as deleted; 0 for the constant of this name.
	GoneAfter time.Duration
	// Now is the time; nil for the real one.
	Now func() time.Time

	manifests  *render.Manifests
	discover   func(context.Context) error
	followsTLS bool
	discovered time.Time
	knowsKinds bool
	gone       goneNodes
	earliest   earliest
}

func (r *Reconciler) now() time.Time {
	if r.Now != nil {
		return r.Now()
	}
	return time.Now()
}

func (r *Reconciler) resync() time.Duration { return min(longestResync, r.goneAfter()) }

// findKinds discovers, at most once in the time of a resync, which kinds the cluster has by now.
func (r *Reconciler) findKinds(ctx context.Context) error {
	if r.now().Sub(r.discovered) < r.resync() {
		return nil
	}
	if err := r.discover(ctx); err != nil {
		return fmt.Errorf("ask which kinds the cluster has: %w", err)
	}
	r.discovered, r.knowsKinds = r.now(), true
	return nil
}

// Reconcile brings everything to what the objects of the cluster ask for. It is called with the name of an object, but
// only one is in effect.
func (r *Reconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	// Once the kinds are known, what is deployed does not depend on whether they can be asked for again.
	unknown := r.findKinds(ctx)
	if unknown != nil && !r.knowsKinds {
		return ctrl.Result{}, unknown
	}
	all := &hppv1.HostPathProvisionerList{}
	if err := r.Client.List(ctx, all); err != nil {
		return ctrl.Result{}, err
	}
	i := slices.IndexFunc(all.Items, func(o hppv1.HostPathProvisioner) bool { return o.Name == request.Name })
	if i < 0 {
		return ctrl.Result{}, nil
	}
	object := all.Items[i].DeepCopy()
	if active := activeOf(all.Items); active.UID != object.UID {
		return ctrl.Result{}, r.ignore(ctx, object, active)
	}
	if object.DeletionTimestamp != nil {
		return r.delete(ctx, object)
	}
	if reason, why := r.refuses(object); reason != "" {
		refused := status.Refuse(object, r.Config.Version, reason, why)
		measure(refused)
		return ctrl.Result{}, r.update(ctx, object, refused)
	}
	if controllerutil.AddFinalizer(object, hppv1.Finalizer) {
		patch := client.MergeFromWithOptions(&all.Items[i], client.MergeFromWithOptimisticLock{})
		if err := r.Client.Patch(ctx, object, patch); err != nil {
			return ctrl.Result{}, err
		}
	}
	wanted, problems := r.deploy(ctx, object)
	gone, err := r.deletedNodes(ctx, object)
	problems = errors.Join(unknown, problems, err)
	seen, err := r.observe(ctx, object, wanted)
	if err != nil {
		return ctrl.Result{}, errors.Join(problems, err)
	}
	seen.DeletedNodes = gone
	if problems != nil {
		seen.Problems = append(seen.Problems, problems)
	}
	again := r.resync()
	if len(wanted.leaving) > 0 {
		seen.Leaving, again = wanted.leaving, poll
	}
	found := status.Assess(object, r.Config.Version, seen)
	measure(found)
	err = r.update(ctx, object, found)
	return ctrl.Result{RequeueAfter: again}, errors.Join(problems, err)
}

// refuses says why nothing is done for an object, for a program and for a reader. The reason is empty if it is reconciled.
func (r *Reconciler) refuses(object *hppv1.HostPathProvisioner) (reason, message string) {
	switch {
	case status.Downgrades(object.Status, r.Config.Version):
		return status.ReasonDowngrade, fmt.Sprintf("Version %s has been rolled out, and %s is older: deploy the operator of %s or newer",
			object.Status.ObservedVersion, r.Config.Version, object.Status.ObservedVersion)
	// The CRD lets neither in. Earlier ones did.
	case object.Spec.PathConfig == nil && len(object.Spec.StoragePools) == 0:
		return status.ReasonPools, "It has no pools, and what is deployed is left as it is: set storagePools"
	case object.Spec.PathConfig != nil && len(object.Spec.StoragePools) > 0:
		return status.ReasonPools, "It has both pathConfig and storagePools, and what is deployed is left as it is: remove one of the two"
	}
	for i := range object.Spec.StoragePools {
		if object.Spec.StoragePools[i].SharesDevice() {
			return status.ReasonPools, fmt.Sprintf("The template of pool %s is a device for all nodes, each of which would format it, and what is deployed is left as it is: "+
				"give it the volumeMode Filesystem, or the access mode ReadWriteOnce", object.Spec.StoragePools[i].Name)
		}
	}
	return "", ""
}

// activeOf is the object in effect: the oldest.
func activeOf(all []hppv1.HostPathProvisioner) *hppv1.HostPathProvisioner {
	oldest := slices.MinFunc(all, func(a, b hppv1.HostPathProvisioner) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
	return &oldest
}

// ignore reports on an object that another one is in effect, and lets it go if it is deleted.
func (r *Reconciler) ignore(ctx context.Context, object, active *hppv1.HostPathProvisioner) error {
	if object.DeletionTimestamp != nil {
		return r.release(ctx, object)
	}
	return r.update(ctx, object, status.Refuse(object, r.Config.Version, status.ReasonSecond, fmt.Sprintf(
		"The HostPathProvisioner %s is older and is the one in effect: there can be only one. Delete one of the two", active.Name)))
}

// release lets an object go.
func (r *Reconciler) release(ctx context.Context, object *hppv1.HostPathProvisioner) error {
	before := object.DeepCopy()
	if !controllerutil.RemoveFinalizer(object, hppv1.Finalizer) {
		return nil
	}
	return client.IgnoreNotFound(r.Client.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})))
}

// A deployment is what an object asks for.
type deployment struct {
	objects []*unstructured.Unstructured
	claims  []*corev1.PersistentVolumeClaim
	// notices are what a user should know of what there is already.
	notices []string
	// leaving are pools that are still to be unmounted, in words.
	leaving []string
	// mounted are the places at which pools are or were mounted.
	mounted []hppv1.MountedPool
}

// find is an object that is wanted, or nil.
func (d *deployment) find(kind, name string) *unstructured.Unstructured {
	for _, object := range d.objects {
		if object.GetKind() == kind && object.GetName() == name {
			return object
		}
	}
	return nil
}

// deploy applies what the object asks for. What fails does not keep the rest from being applied.
func (r *Reconciler) deploy(ctx context.Context, object *hppv1.HostPathProvisioner) (wanted deployment, err error) {
	wanted.mounted = places(object)
	facts, err := r.facts(ctx)
	if err != nil {
		return wanted, err
	}
	rendered, left, err := r.plan(ctx, &facts, object, &wanted)
	if err != nil {
		return wanted, err
	}
	wanted.mounted = findPlaces(object, left)
	without, held := apart(object, left, facts.Mounters)
	if len(held) > 0 {
		if rendered, left, err = r.plan(ctx, &facts, without, &wanted); err != nil {
			return wanted, err
		}
		wanted.mounted = findPlaces(object, left)
	}
	a := r.applier(ctx, object)
	problems := []error{rendered.Clashes()}
	for _, claim := range wanted.claims {
		problems = append(problems, r.applyClaim(ctx, a, claim))
	}
	problems = append(problems, r.applyAll(ctx, a, &wanted))
	problems = append(problems, a.Prune(ctx, r.Config.Namespace, r.prunable(), wanted.objects))
	problems = append(problems, r.dropCleanUps(ctx, a, wanted.objects))
	leaving, err := r.cleanUp(ctx, a, rendered, left)
	wanted.leaving = slices.Concat(leaving, held)
	return wanted, errors.Join(append(problems, err)...)
}

// plan finds what there should be of an object, and what is left of pools that it does not have.
func (r *Reconciler) plan(ctx context.Context, facts *render.Facts, object *hppv1.HostPathProvisioner, wanted *deployment) (*render.Renderer, []leftover, error) {
	rendered := r.manifests.For(r.Config, *facts, object)
	all, err := rendered.Objects()
	if err != nil {
		return nil, nil, err
	}
	found, err := r.unlabelled(ctx, facts, all)
	if err != nil {
		return nil, nil, err
	}
	if found {
		rendered = r.manifests.For(r.Config, *facts, object)
		if all, err = rendered.Objects(); err != nil {
			return nil, nil, err
		}
	}
	left, now, err := r.leftovers(ctx, all)
	wanted.objects, wanted.claims = now, rendered.Claims()
	return rendered, left, err
}

// applyAll applies what is wanted, in its order, but for StorageClasses of which there is another one.
func (r *Reconciler) applyAll(ctx context.Context, a *apply.Applier, wanted *deployment) error {
	accounts := map[string]types.UID{}
	var problems []error
	for _, want := range wanted.objects {
		other, notice, err := r.otherClass(ctx, want)
		if notice != "" {
			wanted.notices = append(wanted.notices, notice)
		}
		if other {
			continue
		}
		if err == nil {
			err = bindToAccount(want, accounts)
		}
		if err == nil {
			err = a.Apply(ctx, want)
		}
		if err == nil && want.GetKind() == "ServiceAccount" {
			accounts[want.GetName()] = want.GetUID()
		}
		if err != nil && slices.Contains(optionalKinds, want.GroupVersionKind()) {
			// The kind may be gone: the next try asks.
			r.discovered = time.Time{}
		}
		problems = append(problems, err)
	}
	return errors.Join(problems...)
}

// bindToAccount has a DaemonSet replace its pods, one node after the other, when their account was deleted and made anew: the
// API server does not take their tokens any more, and kubelet renews these only after most of an hour.
func bindToAccount(want *unstructured.Unstructured, accounts map[string]types.UID) error {
	if want.GetKind() != "DaemonSet" {
		return nil
	}
	name, _, _ := unstructured.NestedString(want.Object, "spec", "template", "spec", "serviceAccountName")
	uid, known := accounts[name]
	if !known {
		return fmt.Errorf("%s: its account %s is not there", apply.Describe(want), name)
	}
	return unstructured.SetNestedField(want.Object, string(uid), "spec", "template", "metadata", "annotations", accountAnnotation)
}

func (r *Reconciler) applier(ctx context.Context, object *hppv1.HostPathProvisioner) *apply.Applier {
	return &apply.Applier{
		Reader:    r.Client,
		Writer:    r.Client,
		Labels:    render.Owned,
		OwnerKind: hppv1.Kind,
		Named: func(object *unstructured.Unstructured) bool {
			return render.MayChange(object.GetKind(), object.GetName())
		},
		// What has mounted a pool is removed once that is unmounted.
		Spared: func(object *unstructured.Unstructured) bool { return render.PoolOf(object.GetLabels()) != "" },
		Changed: func(owned *unstructured.Unstructured, reason string, err error) {
			kind, text := corev1.EventTypeNormal, apply.Describe(owned)
			if err != nil {
				kind, text = corev1.EventTypeWarning, text+": "+err.Error()
			}
			log.FromContext(ctx).Info(reason, "object", apply.Describe(owned), "err", err)
			r.event(object, kind, reason, text)
		},
	}
}

// ownedKinds are those of which the operator has objects in every cluster, but for claims and StorageClasses, which
// outlive it.
var ownedKinds = []schema.GroupVersionKind{
	{Group: "apps", Version: "v1", Kind: "DaemonSet"},
	{Group: "apps", Version: "v1", Kind: "Deployment"},
	{Group: "batch", Version: "v1", Kind: "Job"},
	{Version: "v1", Kind: "Service"},
	{Version: "v1", Kind: "ServiceAccount"},
	{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "Role"},
	{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "RoleBinding"},
	{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "ClusterRole"},
	{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: "ClusterRoleBinding"},
	{Group: "storage.k8s.io", Version: "v1", Kind: "CSIDriver"},
}

// storageClassKind is that of objects which are owned and not removed.
var storageClassKind = schema.GroupVersionKind{Group: "storage.k8s.io", Version: "v1", Kind: "StorageClass"}

func (r *Reconciler) prunable() []schema.GroupVersionKind {
	return append(slices.Clone(ownedKinds), r.Optional.Present()...)
}

// facts asks the cluster what rendering has to know.
func (r *Reconciler) facts(ctx context.Context) (render.Facts, error) {
	facts := render.Facts{
		OpenShift:  r.Optional.Has(constraintsKind),
		Monitoring: r.Optional.Has(prometheusRuleKind) && r.Optional.Has(serviceMonitorKind),
		Selectors:  map[string]map[string]string{},

		Mounters: map[string]render.Spot{}, ClaimPools: map[string]string{},
		ExclusiveClaims: sets.New[string](),
		TLS:             r.TLS.Now(),
	}
	running, err := r.daemonSets(ctx, render.DriverDaemonSet, render.LegacyDaemonSet)
	if err != nil {
		return facts, err
	}
	for name, set := range running {
		if set != nil && set.Spec.Selector != nil {
			facts.Selectors[name] = set.Spec.Selector.MatchLabels
		}
	}
	there, err := r.mountersThere(ctx)
	if err != nil {
		return facts, err
	}
	mounted, err := r.mayBeMounted(ctx)
	if err != nil {
		return facts, err
	}
	facts.OnClaims = len(mounted) > 0
	for name, l := range mounted {
		facts.Mounters[name] = render.Spot{Pool: l.Pool, Node: l.Node}
	}
	for i := range there {
		if there[i].Spec.Selector != nil {
			facts.Selectors[there[i].Name] = there[i].Spec.Selector.MatchLabels
		}
	}
	claims := &corev1.PersistentVolumeClaimList{}
	if err := r.Client.List(ctx, claims, client.InNamespace(r.Config.Namespace)); err != nil {
		return facts, err
	}
	for i := range claims.Items {
		facts.ClaimPools[claims.Items[i].Name] = render.PoolOf(claims.Items[i].Labels)
		if exclusive(&claims.Items[i]) {
			facts.ExclusiveClaims.Insert(claims.Items[i].Name)
		}
	}
	service, err := get[corev1.Service](ctx, r, render.MetricsService)
	if err != nil {
		return facts, err
	}
	facts.HeadlessMetrics = render.Headless(service)
	facts.Nodes, err = r.nodes(ctx, running[render.DriverDaemonSet], there)
	return facts, err
}

// notCached are the names of objects that are wanted, have fields that cannot change, and are not in the cache.
func (r *Reconciler) notCached(ctx context.Context, facts *render.Facts, wanted []*unstructured.Unstructured) (sets.Set[string], error) {
	missing := sets.New[string]()
	for _, object := range wanted {
		name := object.GetName()
		switch kind := object.GetKind(); {
		case kind == "DaemonSet" || kind == "Deployment":
			if facts.Selectors[name] == nil {
				missing.Insert(name)
			}
		case kind == "Service" && name == render.MetricsService:
			if cached, err := get[corev1.Service](ctx, r, name); err != nil {
				return nil, err
			} else if cached == nil {
				missing.Insert(name)
			}
		}
	}
	return missing, nil
}

// unlabelled adds to facts what cannot change of objects that are wanted and not in the cache: they may have lost the labels by which
// it has them. It says whether it found any.
func (r *Reconciler) unlabelled(ctx context.Context, facts *render.Facts, wanted []*unstructured.Unstructured) (found bool, err error) {
	missing, err := r.notCached(ctx, facts, wanted)
	if err != nil || missing.Len() == 0 {
		return false, err
	}
	daemonSets, deployments, services := &appsv1.DaemonSetList{}, &appsv1.DeploymentList{}, &corev1.ServiceList{}
	for _, list := range []client.ObjectList{daemonSets, deployments, services} {
		if err := r.APIReader.List(ctx, list, client.InNamespace(r.Config.Namespace)); err != nil {
			return false, err
		}
	}
	selects := func(name string, selector *metav1.LabelSelector) {
		if missing.Has(name) && selector != nil {
			facts.Selectors[name], found = selector.MatchLabels, true
		}
	}
	for i := range daemonSets.Items {
		selects(daemonSets.Items[i].Name, daemonSets.Items[i].Spec.Selector)
	}
	for i := range deployments.Items {
		selects(deployments.Items[i].Name, deployments.Items[i].Spec.Selector)
	}
	for i := range services.Items {
		if service := &services.Items[i]; missing.Has(service.Name) && !render.Headless(service) {
			facts.HeadlessMetrics, found = false, true
		}
	}
	return found, nil
}

// daemonSets reads DaemonSets from the cache, by name, with nil for one that is not there.
func (r *Reconciler) daemonSets(ctx context.Context, names ...string) (map[string]*appsv1.DaemonSet, error) {
	found := map[string]*appsv1.DaemonSet{}
	for _, name := range names {
		set, err := get[appsv1.DaemonSet](ctx, r, name)
		if err != nil {
			return nil, err
		}
		found[name] = set
	}
	return found, nil
}

// get reads an object of the operator's namespace from the cache, or returns nil. The cache has the content that is not
// compiled in too, so that there is one for all.
func get[T any](ctx context.Context, r *Reconciler, name string) (*T, error) {
	var typed T
	object, ok := any(&typed).(client.Object)
	if !ok {
		return nil, fmt.Errorf("%T is no object", typed)
	}
	kind, err := r.Client.GroupVersionKindFor(object)
	if err != nil {
		return nil, err
	}
	live := &unstructured.Unstructured{}
	live.SetGroupVersionKind(kind)
	if err := r.Client.Get(ctx, client.ObjectKey{Namespace: r.Config.Namespace, Name: name}, live); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return &typed, runtime.DefaultUnstructuredConverter.FromUnstructured(live.Object, &typed)
}

// observe reads what there is of what an object asks for.
func (r *Reconciler) observe(ctx context.Context, object *hppv1.HostPathProvisioner, wanted deployment) (status.Observed, error) {
	seen := status.Observed{Notices: append(render.Notices(object), wanted.notices...), Outdated: sets.New[string](), MountedPools: wanted.mounted}
	if object.HasFeature(hppv1.Snapshotting) && !r.Optional.Snapshots() {
		seen.Notices = append(seen.Notices, "The feature gate Snapshotting has no effect: the cluster has no VolumeSnapshots. "+
			"Install the CustomResourceDefinitions and the snapshot-controller of external-snapshotter")
	}
	left, err := r.leftByEarliest(ctx, object)
	if err != nil {
		return seen, err
	}
	seen.Notices = append(seen.Notices, left...)
	if seen.DaemonSets, err = r.daemonSets(ctx, render.DaemonSets(object)...); err != nil {
		return seen, err
	}
	upToDate := func(kind string, live client.Object) bool {
		want := wanted.find(kind, live.GetName())
		return want != nil && apply.UpToDate(live, want)
	}
	for name, set := range seen.DaemonSets {
		if set != nil && !upToDate("DaemonSet", set) {
			seen.Outdated.Insert(name)
		}
	}
	pods := &corev1.PodList{}
	if err := r.Client.List(ctx, pods, client.InNamespace(r.Config.Namespace), client.MatchingLabels{render.AppLabel: render.App}); err != nil {
		return seen, err
	}
	seen.Pods = slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return !ownedPod(&p) })
	if seen.Services, err = r.services(ctx, object, seen.Pods); err != nil {
		return seen, err
	}
	claims := &corev1.PersistentVolumeClaimList{}
	if err := r.Client.List(ctx, claims, client.InNamespace(r.Config.Namespace)); err != nil {
		return seen, err
	}
	for _, claim := range claims.Items {
		if slices.ContainsFunc(wanted.claims, func(want *corev1.PersistentVolumeClaim) bool { return want.Name == claim.Name }) {
			seen.Claims = append(seen.Claims, claim)
		} else {
			seen.LeftClaims = append(seen.LeftClaims, claim)
		}
	}
	there, err := r.mountersThere(ctx)
	seen.Mounters = slices.DeleteFunc(there, func(d appsv1.Deployment) bool { return d.DeletionTimestamp != nil || !upToDate("Deployment", &d) })
	return seen, err
}

// update writes the status if it has changed.
func (r *Reconciler) update(ctx context.Context, object *hppv1.HostPathProvisioner, to hppv1.HostPathProvisionerStatus) error {
	if equality.Semantic.DeepEqual(object.Status, to) {
		return nil
	}
	changed := object.DeepCopy()
	changed.Status = to
	if err := r.Client.Status().Update(ctx, changed); err != nil {
		return client.IgnoreNotFound(err)
	}
	r.announce(object, to)
	return nil
}

// announce makes an event of each condition that has changed its value.
func (r *Reconciler) announce(object *hppv1.HostPathProvisioner, to hppv1.HostPathProvisionerStatus) {
	for _, condition := range to.Conditions {
		before := meta.FindStatusCondition(object.Status.Conditions, condition.Type)
		if before != nil && before.Status == condition.Status && before.Reason == condition.Reason {
			continue
		}
		kind := corev1.EventTypeNormal
		if condition.Type == hppv1.ConditionDegraded && condition.Status == metav1.ConditionTrue {
			kind = corev1.EventTypeWarning
		}
		reason := condition.Reason
		if condition.Type == hppv1.ConditionAvailable && condition.Status == metav1.ConditionTrue {
			reason = status.ReasonHealthy
		}
		r.event(object, kind, reason, fmt.Sprintf("%s is %s: %s", condition.Type, condition.Status, condition.Message))
	}
}

// event makes an event of an object. The API server refuses longer notes.
func (r *Reconciler) event(object *hppv1.HostPathProvisioner, kind, reason, note string) {
	const most = 1024
	r.Recorder.Eventf(object, nil, kind, reason, "Reconcile", "%s", status.Shorten(note, most))
}
