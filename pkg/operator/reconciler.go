package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
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
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
)

// Resync is how often the reconciler checks what no watch shows, unless it has another time.
const Resync = 5 * time.Minute

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

	// Stop ends the operator, which has found another one.
	Stop context.CancelCauseFunc

	// Resync is how often what no watch shows is checked: what names nodes that are gone, and which kinds the cluster has; 0 for the constant
	// of this name.
	Resync time.Duration
	// Now is the time; nil for the real one.
	Now func() time.Time

	manifests *render.Manifests
	kinds     kindDiscovery
	left      leftBehind
	earliest  earliest
	choices   choices
}

func (r *Reconciler) now() time.Time {
	if r.Now != nil {
		return r.Now()
	}
	return time.Now()
}

func (r *Reconciler) resync() time.Duration { return cmp.Or(r.Resync, Resync) }

// Reconcile brings everything to what the objects of the cluster ask for. It is called with the name of an object, but
// only one is in effect.
func (r *Reconciler) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	// Once the kinds are known, what is deployed does not depend on whether they can be asked for again.
	unknown := r.kinds.refresh(ctx, r.now(), r.resync())
	if unknown != nil && !r.kinds.known {
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
	if err := r.checkAlone(ctx, object); err != nil {
		return ctrl.Result{}, err
	}
	if active := activeOf(all.Items); active.UID != object.UID {
		return ctrl.Result{}, r.ignore(ctx, object, active)
	}
	if object.DeletionTimestamp != nil {
		return r.delete(ctx, object)
	}
	if reason, why := r.refuses(object); reason != "" {
		return ctrl.Result{}, r.refuse(ctx, object, reason, why)
	}
	if controllerutil.AddFinalizer(object, hppv1.Finalizer) {
		patch := client.MergeFromWithOptions(&all.Items[i], client.MergeFromWithOptimisticLock{})
		if err := r.Client.Patch(ctx, object, patch); err != nil {
			return ctrl.Result{}, err
		}
	}
	if err := r.remember(ctx, object); err != nil {
		return ctrl.Result{}, err
	}
	wanted, problems := r.deploy(ctx, object)
	gone, err := r.deletedNodes(ctx)
	problems = errors.Join(unknown, problems, err, storageProfiles{r.cluster(), r.Optional}.complete(ctx, object))
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
	err = r.reporter().update(ctx, object, found)
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

// refuse reports on an object that nothing is changed for, and whether what was rolled out before serves now.
func (r *Reconciler) refuse(ctx context.Context, object *hppv1.HostPathProvisioner, reason, why string) error {
	before, err := r.cluster().rolledOut(ctx)
	if err != nil {
		return err
	}
	refused := status.Refuse(object, r.Config.Version, reason, why, before)
	measure(refused)
	return r.reporter().update(ctx, object, refused)
}

// rolledOut is what there is, whether it is as it should be or not.
func (c *cluster) rolledOut(ctx context.Context) (*status.Observed, error) {
	driver, err := get[appsv1.DaemonSet](ctx, c, render.DriverDaemonSet)
	if err != nil {
		return nil, err
	}
	seen := &status.Observed{DaemonSets: map[string]*appsv1.DaemonSet{render.DriverDaemonSet: driver}}
	if driver != nil {
		deployed, unknown := render.DeployedPools(driver)
		if seen.Deployed = deployed; unknown != nil {
			seen.Problems = append(seen.Problems, unknown)
		}
	}
	pods, err := c.pods(ctx)
	if err != nil {
		return nil, err
	}
	seen.Pods = slices.DeleteFunc(pods, func(p corev1.Pod) bool { return !ownedPod(&p) })
	if seen.Services, err = c.services(ctx, seen.Deployed, seen.Pods); err != nil {
		return nil, err
	}
	seen.Mounters, err = list[appsv1.Deployment](ctx, c, client.InNamespace(c.namespace), client.HasLabels{render.PoolLabel})
	return seen, err
}

// ignore reports on an object that another one is in effect, and lets it go if it is deleted.
func (r *Reconciler) ignore(ctx context.Context, object, active *hppv1.HostPathProvisioner) error {
	if object.DeletionTimestamp != nil {
		return r.release(ctx, object)
	}
	return r.reporter().update(ctx, object, status.Refuse(object, r.Config.Version, status.ReasonSecond, fmt.Sprintf(
		"The HostPathProvisioner %s is older and is the one in effect: there can be only one. Delete one of the two", active.Name), nil))
}

func (r *Reconciler) release(ctx context.Context, object *hppv1.HostPathProvisioner) error {
	before := object.DeepCopy()
	if !controllerutil.RemoveFinalizer(object, hppv1.Finalizer) {
		return nil
	}
	return client.IgnoreNotFound(r.Client.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})))
}

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
	mounted, err := r.cluster().mayBeMounted(ctx, object)
	if err != nil {
		return wanted, err
	}
	facts, err := r.facts(ctx, mounted)
	if err != nil {
		return wanted, err
	}
	rendered, left, err := r.plan(facts, object, mounted, &wanted)
	if err != nil {
		return wanted, err
	}
	wanted.mounted = findPlaces(object, left)
	without, held := apart(object, left, facts.Mounters)
	if len(held) > 0 {
		if rendered, left, err = r.plan(facts, without, mounted, &wanted); err != nil {
			return wanted, err
		}
		wanted.mounted = findPlaces(object, left)
	}
	c := &cleaner{r.cluster(), r.applier(ctx, object), rendered}
	problems := []error{rendered.Clashes()}
	for _, claim := range wanted.claims {
		problems = append(problems, c.applyClaim(ctx, claim))
	}
	problems = append(problems, r.applyAll(ctx, c.applier, &wanted))
	problems = append(problems, c.applier.Prune(ctx, r.Config.Namespace, r.Optional.prunable(), wanted.objects))
	problems = append(problems, c.dropCleanUps(ctx, wanted.objects))
	leaving, err := c.cleanUp(ctx, left)
	wanted.leaving = slices.Concat(leaving, held)
	return wanted, errors.Join(append(problems, err)...)
}

// plan finds what there should be of an object, and what is left of pools that it does not have.
func (r *Reconciler) plan(facts render.Facts, object *hppv1.HostPathProvisioner, mounted map[string]*leftover, wanted *deployment) (rendered *render.Renderer, left []leftover, err error) {
	rendered = r.manifests.For(r.Config, facts, object)
	all, err := rendered.Objects()
	if err != nil {
		return nil, nil, err
	}
	left, wanted.objects = leftovers(mounted, all)
	wanted.claims = rendered.Claims()
	return rendered, left, nil
}

// applyClaim makes a claim that is not there. Of one that is, only the size follows the template, and only upwards: the
// rest cannot change.
func (c *cleaner) applyClaim(ctx context.Context, want *corev1.PersistentVolumeClaim) error {
	converted, err := render.Convert(want)
	if err != nil {
		return err
	}
	live := &corev1.PersistentVolumeClaim{}
	if err := c.Get(ctx, client.ObjectKeyFromObject(want), live); apierrors.IsNotFound(err) {
		return c.applier.Create(ctx, converted)
	} else if err != nil {
		return err
	}
	if err := c.applier.Disown(ctx, live); err != nil {
		return err
	}
	size, has := want.Spec.Resources.Requests.Storage(), live.Spec.Resources.Requests.Storage()
	if size.Cmp(*has) <= 0 {
		return nil
	}
	patch := fmt.Appendf(nil, `{"spec":{"resources":{"requests":{"storage":%q}}}}`, size.String())
	if err := c.Patch(ctx, live, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(apply.FieldManager)); err != nil {
		return fmt.Errorf("grow the claim %s: %w", want.Name, err)
	}
	// A takeover brings templates that have grown since their claims were made.
	c.applier.Changed(converted, "ClaimGrown", nil)
	return nil
}

// applyAll applies what is wanted, in its order, but for StorageClasses of which there is another one.
func (r *Reconciler) applyAll(ctx context.Context, a *apply.Applier, wanted *deployment) error {
	accounts := map[string]types.UID{}
	var problems []error
	for _, want := range wanted.objects {
		other, notice, err := r.cluster().otherClass(ctx, want)
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
			r.kinds.last = time.Time{}
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
		API:       r.APIReader,
		Writer:    r.Client,
		Labels:    render.Owned,
		OwnerKind: hppv1.Kind,
		Named: func(object client.Object) bool {
			return render.MayChange(object.GetObjectKind().GroupVersionKind().Kind, object.GetName())
		},
		// What has mounted a pool is removed once that is unmounted.
		Spared: func(object client.Object) bool { return render.PoolOf(object.GetLabels()) != "" },
		Changed: func(owned client.Object, reason string, err error) {
			kind, text := corev1.EventTypeNormal, apply.Describe(owned)
			if err != nil {
				kind, text = corev1.EventTypeWarning, text+": "+err.Error()
			}
			log.FromContext(ctx).Info(reason, "object", apply.Describe(owned), "err", err)
			r.reporter().event(object, kind, reason, text)
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

// facts asks the cluster what rendering has to know.
func (r *Reconciler) facts(ctx context.Context, mounted map[string]*leftover) (render.Facts, error) {
	c := r.cluster()
	facts := render.Facts{
		OpenShift:  r.Optional.Has(constraintsKind),
		Monitoring: r.Optional.Has(prometheusRuleKind) && r.Optional.Has(serviceMonitorKind),
		Mounters:   map[string]render.Spot{}, ClaimPools: map[string]string{},
		ExclusiveClaims: sets.New[string](), BlockClaims: sets.New[string](),
		TLS: r.TLS.Now(),
	}
	for name, l := range mounted {
		facts.Mounters[name] = l.spot()
	}
	claims, err := c.claims(ctx)
	if err != nil {
		return facts, err
	}
	for i := range claims {
		facts.ClaimPools[claims[i].Name] = render.PoolOf(claims[i].Labels)
		if exclusive(&claims[i]) {
			facts.ExclusiveClaims.Insert(claims[i].Name)
		}
		if mode := claims[i].Spec.VolumeMode; mode != nil && *mode == corev1.PersistentVolumeBlock {
			facts.BlockClaims.Insert(claims[i].Name)
		}
	}
	driver, err := get[appsv1.DaemonSet](ctx, c, render.DriverDaemonSet)
	if err != nil {
		return facts, err
	}
	facts.Nodes, err = c.nodes(ctx, driver, mounted)
	return facts, err
}

func (r *Reconciler) observe(ctx context.Context, object *hppv1.HostPathProvisioner, wanted deployment) (status.Observed, error) {
	c := r.cluster()
	seen := status.Observed{Outdated: sets.New[string](), MountedPools: wanted.mounted}
	var err error
	if seen.Notices, err = r.notices(ctx, object, wanted); err != nil {
		return seen, err
	}
	upToDate := func(kind string, live client.Object) bool {
		want := wanted.find(kind, live.GetName())
		return want != nil && apply.UpToDate(live, want)
	}
	seen.DaemonSets = map[string]*appsv1.DaemonSet{}
	for _, name := range render.DaemonSets(object) {
		set, err := get[appsv1.DaemonSet](ctx, c, name)
		if err != nil {
			return seen, err
		}
		if seen.DaemonSets[name] = set; set != nil && !upToDate("DaemonSet", set) {
			seen.Outdated.Insert(name)
		}
	}
	pods, err := c.pods(ctx)
	if err != nil {
		return seen, err
	}
	seen.Pods = slices.DeleteFunc(pods, func(p corev1.Pod) bool { return !ownedPod(&p) })
	if seen.Services, err = c.services(ctx, render.Pools(object), seen.Pods); err != nil {
		return seen, err
	}
	claims, err := c.claims(ctx)
	if err != nil {
		return seen, err
	}
	for _, claim := range claims {
		if slices.ContainsFunc(wanted.claims, func(want *corev1.PersistentVolumeClaim) bool { return want.Name == claim.Name }) {
			seen.Claims = append(seen.Claims, claim)
		} else {
			seen.LeftClaims = append(seen.LeftClaims, claim)
		}
	}
	if seen.Mounters, err = c.mounters(ctx, wanted); err != nil {
		return seen, err
	}
	seen.Replaced = sets.New[string]()
	for i := range seen.Mounters {
		if m := &seen.Mounters[i]; !upToDate("Deployment", m) {
			seen.Replaced.Insert(m.Name)
		}
	}
	seen.NotChosen, err = r.notChosen(ctx, object, &seen)
	return seen, err
}

// notices are what the status says beside the conditions.
func (r *Reconciler) notices(ctx context.Context, object *hppv1.HostPathProvisioner, wanted deployment) ([]string, error) {
	all := append(render.Notices(object), wanted.notices...)
	if object.HasFeature(hppv1.Snapshotting) && !r.Optional.Has(place.SnapshotContent) {
		all = append(all, "The feature gate Snapshotting has no effect: the cluster has no VolumeSnapshots. "+
			"Install the CustomResourceDefinitions and the snapshot-controller of external-snapshotter")
	}
	left, err := r.leftByEarliest(ctx, object)
	return append(all, left...), err
}

// mounters are those that there are of the wanted ones.
func (c *cluster) mounters(ctx context.Context, wanted deployment) ([]appsv1.Deployment, error) {
	all, err := list[appsv1.Deployment](ctx, c, client.InNamespace(c.namespace), client.HasLabels{render.PoolLabel})
	return slices.DeleteFunc(all, func(d appsv1.Deployment) bool {
		return d.DeletionTimestamp != nil || wanted.find("Deployment", d.Name) == nil
	}), err
}
