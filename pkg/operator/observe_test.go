package operator

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// rolledOut has the driver ready on so many nodes.
func (h *harness) rolledOut(nodes int32) *appsv1.DaemonSet {
	h.t.Helper()
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
	if !h.has(set) {
		h.t.Fatal("there is no DaemonSet")
	}
	set.Status = appsv1.DaemonSetStatus{
		ObservedGeneration: set.Generation, DesiredNumberScheduled: nodes, CurrentNumberScheduled: nodes, UpdatedNumberScheduled: nodes, NumberReady: nodes,
	}
	must.Succeed(h.t, h.Status().Update(h.t.Context(), set))
	return set
}

// scheduled has the driver ready on the nodes that are to have it, and pods of it on others.
func (h *harness) scheduled(desired, misscheduled int32) {
	h.t.Helper()
	set := h.rolledOut(desired)
	set.Generation = 1 // as an API server gives it
	must.Succeed(h.t, h.Update(h.t.Context(), set))
	set = h.rolledOut(desired)
	set.Status.NumberMisscheduled = misscheduled
	must.Succeed(h.t, h.Status().Update(h.t.Context(), set))
}

// status is that of the object, and its condition Available.
func (h *harness) status() (hppv1.HostPathProvisionerStatus, metav1.Condition) {
	h.t.Helper()
	object := stored("hpp", 1, false)
	if !h.has(object) {
		h.t.Fatal("there is no object")
	}
	available := meta.FindStatusCondition(object.Status.Conditions, hppv1.ConditionAvailable)
	if available == nil {
		h.t.Fatalf("the conditions are %+v", object.Status.Conditions)
	}
	return object.Status, *available
}

// The caches do not show at once what was applied. Until they do, the DaemonSet that they have is the one from before, which is rolled
// out: the new version is not, although a driver is available.
func TestStatusDoesNotRelyOnWhatWasThereBefore(t *testing.T) {
	h := newHarness(t, stored("hpp", 1, false))
	h.reconcile("hpp")
	before := h.rolledOut(1)
	h.reconcile("hpp")
	if status, available := h.status(); status.ObservedVersion != "v1" || available.Status != metav1.ConditionTrue {
		t.Fatalf("the first version is not rolled out: %+v", status)
	}

	upToDate := h.reconciler.Client
	h.reconciler.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, api client.WithWatch, key client.ObjectKey, to client.Object, options ...client.GetOption) error {
			if live, ok := to.(*unstructured.Unstructured); ok && live.GetKind() == "DaemonSet" {
				content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(before)
				live.SetUnstructuredContent(content)
				live.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("DaemonSet"))
				return err
			}
			return api.Get(ctx, key, to, options...)
		},
	})
	h.reconciler.Config.Version, h.reconciler.Config.Verbosity = "v2", 3
	h.reconcile("hpp")
	if status, available := h.status(); status.ObservedVersion != "v1" || available.Status != metav1.ConditionTrue || meta.IsStatusConditionTrue(status.Conditions, hppv1.ConditionRolledOut) {
		t.Errorf("the version %s is observed, and the conditions are %+v", status.ObservedVersion, status.Conditions)
	}
	h.reconciler.Client = upToDate
	h.reconcile("hpp")
	if status, available := h.status(); status.ObservedVersion != "v2" || available.Status != metav1.ConditionTrue {
		t.Errorf("the version %s is observed, and Available is %s: %s", status.ObservedVersion, available.Status, available.Message)
	}
}

// A driver that cannot be deployed as it is wanted is not available, and the metric says so, although an earlier one runs.
func TestDaemonSetThatCannotBeApplied(t *testing.T) {
	h := newHarness(t, stored("hpp", 1, false))
	h.reconcile("hpp")
	h.rolledOut(1)
	h.reconcile("hpp")
	h.reconciler.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		Apply: func(ctx context.Context, api client.WithWatch, o runtime.ApplyConfiguration, options ...client.ApplyOption) error {
			if u, ok := o.(interface{ GetKind() string }); ok && u.GetKind() == "DaemonSet" {
				return errors.New("not so")
			}
			return api.Apply(ctx, o, options...)
		},
	})
	h.reconciler.Config.Version, h.reconciler.Config.Verbosity = "v2", 3
	if _, err := h.reconciler.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: "hpp"}}); err == nil {
		t.Fatal("the DaemonSet was applied")
	}
	if status, available := h.status(); status.ObservedVersion != "v1" || available.Status != metav1.ConditionFalse {
		t.Errorf("the version %s is observed, and Available is %s", status.ObservedVersion, available.Status)
	}
	if got := readyMetric(t); got != 0 {
		t.Errorf("the metric is %v", got)
	}
}

// onClaims is an object with a pool on claims.
func onClaims() *hppv1.HostPathProvisioner {
	object := stored("hpp", 1, false)
	object.Spec.StoragePools = []hppv1.StoragePool{{Name: "local", Path: "/mnt/local", PVCTemplate: &hppv1.ClaimTemplate{}}}
	return object
}

// driverPod is the pod of the driver on a node.
func driverPod(node string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "driver-" + node, Labels: map[string]string{render.AppLabel: render.App},
			OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: render.DriverDaemonSet}}},
		Spec: corev1.PodSpec{NodeName: node},
	}
}

// The claim of a node that has left stays, because it may have data. Whatever becomes of it, the pool is ready where it is wanted.
func TestClaimOfNodeThatLeft(t *testing.T) {
	h := newHarness(t, onClaims(), nodeThat("node-a", corev1.ConditionTrue), driverPod("node-a"), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "hpp-pool-local-node-z", Labels: render.PoolLabels("local")},
		Status:     corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimLost},
	})
	h.reconcile("hpp")
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "hpp-pool-local-node-a"}}
	mounter := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "hpp-pool-local-node-a"}}
	if !h.has(claim) || !h.has(mounter) {
		t.Fatal("the pool has no claim or no mounter on its node")
	}
	claim.Status.Phase = corev1.ClaimBound
	must.Succeed(t, h.Status().Update(t.Context(), claim))
	mounter.Status = appsv1.DeploymentStatus{ObservedGeneration: mounter.Generation, Replicas: 1, UpdatedReplicas: 1, ReadyReplicas: 1}
	must.Succeed(t, h.Status().Update(t.Context(), mounter))
	h.rolledOut(1)
	h.reconcile("hpp")
	status, available := h.status()
	if available.Status != metav1.ConditionTrue {
		t.Errorf("not available: %s", available.Message)
	}
	if claims := status.StoragePoolStatuses[0].ClaimStatuses; len(claims) != 2 || !strings.HasSuffix(claims[1].Name, "node-z") {
		t.Errorf("the status has the claims %+v, want that of the node that left too", claims)
	}
}

// The API server takes no event whose note is longer, and what is longest says most: why an object cannot be applied.
func TestEventsAreShortEnough(t *testing.T) {
	const most = 1024
	h := newHarness(t, stored("hpp", 1, false))
	h.reconciler.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
			return errors.New("not so, " + strings.Repeat("because ä, ", 1000))
		},
	})
	if _, err := h.reconciler.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: "hpp"}}); err == nil {
		t.Fatal("everything was applied")
	}
	events := h.reconciler.Recorder.(*events.FakeRecorder).Events
	if len(events) < 5 {
		t.Fatalf("there are %d events", len(events))
	}
	for range len(events) {
		words := strings.SplitN(<-events, " ", 3)
		if note := words[2]; len(note) > most || !utf8.ValidString(note) {
			t.Errorf("the event %s has %d bytes: %.40s", words[1], len(note), note)
		}
	}
}

// An operator that refuses to work says of the object what is known of it, and not that there is none.
func TestMetricOfRefusedDowngrade(t *testing.T) {
	object := stored("hpp", 1, false)
	object.Generation = 1
	h := newHarness(t, object)
	h.reconciler.Config.Version = "v1.1.0"
	h.reconcile("hpp")
	h.reconcile("hpp")
	h.rolledOut(1)
	h.reconcile("hpp")
	ready.Set(noObject)
	h.reconciler.Config.Version = "v1.0.0"
	h.reconcile("hpp")
	status, available := h.status()
	if degraded := meta.FindStatusCondition(status.Conditions, hppv1.ConditionDegraded); degraded == nil || degraded.Status != metav1.ConditionTrue {
		t.Fatalf("the downgrade is not refused: %+v", status)
	}
	if got := readyMetric(t); got != 1 || available.Status != metav1.ConditionTrue {
		t.Errorf("the metric is %v, and Available is %s", got, available.Status)
	}
}

// An object that has lost the operator's labels is not in the cache. It gets them back with what cannot change as it was: of another
// selector the API server would take nothing.
func TestSelectorsOfObjectsWithoutLabels(t *testing.T) {
	h := newHarness(t, onClaims(), nodeThat("node-a", corev1.ConditionTrue), driverPod("node-a"))
	h.reconcile("hpp")
	upstream := map[string]string{"example.com/of": "upstream"}
	set := h.rolledOut(1)
	mounter := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "hpp-pool-local-node-a"}}
	h.has(mounter)
	set.Labels, set.Spec.Selector = nil, &metav1.LabelSelector{MatchLabels: upstream}
	mounter.Labels, mounter.Spec.Selector = nil, &metav1.LabelSelector{MatchLabels: upstream}
	must.Succeed(t, h.Update(t.Context(), set))
	must.Succeed(t, h.Update(t.Context(), mounter))
	// The cache has only what is labelled.
	h.reconciler.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		Apply: func(ctx context.Context, api client.WithWatch, wanted runtime.ApplyConfiguration, options ...client.ApplyOption) error {
			text, err := json.Marshal(wanted)
			if err == nil && strings.Contains(string(text), `"kind":"D`) && !strings.Contains(string(text), `"matchLabels":{"example.com/of":"upstream"}`) {
				return apierrors.NewInvalid(schema.GroupKind{}, "selector", nil)
			}
			return errors.Join(err, api.Apply(ctx, wanted, options...))
		},
		Get: func(ctx context.Context, api client.WithWatch, key client.ObjectKey, to client.Object, options ...client.GetOption) error {
			err := api.Get(ctx, key, to, options...)
			if err == nil && to.GetNamespace() == "storage" && to.GetLabels()[render.AppLabel] == "" {
				return apierrors.NewNotFound(schema.GroupResource{Resource: to.GetObjectKind().GroupVersionKind().Kind}, key.Name)
			}
			return err
		},
	})
	h.reconcile("hpp")
	h.has(set)
	h.has(mounter)
	for _, object := range []struct {
		client.Object
		selector *metav1.LabelSelector
	}{{set, set.Spec.Selector}, {mounter, mounter.Spec.Selector}} {
		if object.GetLabels()[render.AppLabel] != render.App || !maps.Equal(object.selector.MatchLabels, upstream) {
			t.Errorf("%s has the labels %v and the selector %v", object.GetName(), object.GetLabels(), object.selector.MatchLabels)
		}
	}
}

func readyMetric(t *testing.T) float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(ready)
	families, err := registry.Gather()
	if err != nil || len(families) != 1 {
		t.Fatalf("the metrics are %v, %v", families, err)
	}
	return families[0].GetMetric()[0].GetGauge().GetValue()
}

// The driver goes on where a taint came later, and what is there counts for no node that is to have it.
func TestNodeWithATaintCountsForNoOther(t *testing.T) {
	served := func(here, tainted string) []client.Object {
		return []client.Object{classOf("local"), published("here", here, here), published("tainted", tainted, tainted)}
	}
	for name, tt := range map[string]struct {
		mounted map[string]bool
		more    []client.Object
		phase   hppv1.StoragePoolPhase
		words   string
	}{
		"both are mounted":         {map[string]bool{"here": true, "tainted": true}, nil, hppv1.StoragePoolReady, ""},
		"it is mounted":            {map[string]bool{"here": false, "tainted": true}, nil, hppv1.StoragePoolMounting, "usable on 0 of 1 nodes, and not mounted on here"},
		"it is not mounted":        {map[string]bool{"here": true, "tainted": false}, nil, hppv1.StoragePoolReady, ""},
		"it is served":             {map[string]bool{"here": true, "tainted": true}, served("", "1Gi"), hppv1.StoragePoolMounting, "serves on no node, its driver has the reason in its log and as a metric: here"},
		"it is not served":         {map[string]bool{"here": true, "tainted": true}, served("1Gi", ""), hppv1.StoragePoolReady, ""},
		"neither is known to be":   {map[string]bool{"here": true, "tainted": true}, []client.Object{classOf("local")}, hppv1.StoragePoolMounting, "not published"},
		"only the other publishes": {map[string]bool{"here": true, "tainted": true}, []client.Object{classOf("local"), published("tainted", "1Gi", "1Gi")}, hppv1.StoragePoolMounting, "not published"},
	} {
		t.Run(name, func(t *testing.T) {
			withTaint := nodeThat("tainted", corev1.ConditionTrue)
			withTaint.Spec.Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}
			objects := []client.Object{onClaims(), nodeThat("here", corev1.ConditionTrue), withTaint, driverPod("here"), driverPod("tainted")}
			for node := range tt.mounted {
				m := mounterOf("local", node)
				objects = append(objects, m, claimFor(m, corev1.ReadWriteOnce))
			}
			h := newHarness(t, append(objects, tt.more...)...)
			h.reconcile("hpp")
			h.scheduled(1, 1)
			h.reconcile("hpp")
			for node, mounted := range tt.mounted {
				m := mounterOf("local", node)
				h.has(m)
				m.Status = appsv1.DeploymentStatus{ObservedGeneration: m.Generation, Replicas: 1, UpdatedReplicas: 1}
				if mounted {
					m.Status.ReadyReplicas = 1
				}
				must.Succeed(t, h.Status().Update(t.Context(), m))
			}
			h.reconcile("hpp")
			status, available := h.status()
			pool := status.StoragePoolStatuses[0]
			if pool.Phase != tt.phase || pool.DesiredReady != 1 || (pool.Message == "") != (tt.words == "") || !strings.Contains(pool.Message, tt.words) {
				t.Errorf("the pool is %s on %d of %d nodes: %q", pool.Phase, pool.CurrentReady, pool.DesiredReady, pool.Message)
			}
			if is := available.Status == metav1.ConditionTrue; is != (pool.Phase == hppv1.StoragePoolReady || strings.Contains(tt.words, "published")) {
				t.Errorf("Available is %s: %s", available.Status, available.Message)
			}
		})
	}
}

// An object that is refused, as after a rollback of the operator alone, is available as long as the driver is.
func TestRefusedObjectIsAvailableWhileTheDriverIs(t *testing.T) {
	object := stored("hpp", 1, false)
	h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), driverPod("here"))
	h.reconcile("hpp")
	h.rolledOut(1)
	h.reconcile("hpp")
	h.has(object)
	object.Status.ObservedVersion = "v99.0.0"
	must.Succeed(t, h.Status().Update(t.Context(), object))
	h.reconciler.Config.Version = "v1.0.0"
	for _, ready := range []int32{1, 0, 1} {
		set := h.rolledOut(1)
		set.Status.NumberReady = ready
		must.Succeed(t, h.Status().Update(t.Context(), set))
		h.reconcile("hpp")
		h.has(object)
		if got := meta.FindStatusCondition(object.Status.Conditions, hppv1.ConditionAvailable); got.Reason != status.ReasonDowngrade || (got.Status == metav1.ConditionTrue) != (ready > 0) {
			t.Errorf("with %d pods of the driver ready: %+v", ready, got)
		}
	}
}

// And as long as its pools on claims are mounted, but for one that was added since.
func TestRefusedObjectIsAvailableWhileItsPoolsAre(t *testing.T) {
	object, mounter := onClaims(), mounterOf("local", "here")
	h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), driverPod("here"), mounter, claimFor(mounter, corev1.ReadWriteOnce))
	h.reconcile("hpp")
	h.scheduled(1, 0)
	h.has(object)
	object.Spec.StoragePools = append(object.Spec.StoragePools, hppv1.StoragePool{Name: "added", Path: "/mnt/added", PVCTemplate: &hppv1.ClaimTemplate{}})
	must.Succeed(t, h.Update(t.Context(), object))
	object.Status.ObservedVersion, object.Status.ObservedGeneration = "v99.0.0", 1
	must.Succeed(t, h.Status().Update(t.Context(), object))
	h.reconciler.Config.Version = "v1.0.0"
	for _, ready := range []int32{1, 0, 1} {
		h.has(mounter)
		mounter.Status = appsv1.DeploymentStatus{ObservedGeneration: mounter.Generation, Replicas: 1, UpdatedReplicas: 1, ReadyReplicas: ready}
		must.Succeed(t, h.Status().Update(t.Context(), mounter))
		h.reconcile("hpp")
		_, got := h.status()
		if got.Reason != status.ReasonDowngrade || (got.Status == metav1.ConditionTrue) != (ready > 0) || readyMetric(t) != float64(ready) {
			t.Errorf("with the pool mounted on %d nodes: %+v, the metric is %v", ready, got, readyMetric(t))
		}
	}
}

// A pool in a directory is judged by what the driver publishes, which knows none that was added since, and serves all others.
func TestRefusedObjectIsAvailableWhileThePoolsOfItsDriverAreServed(t *testing.T) {
	object := stored("hpp", 1, false)
	local, added := classOf("local"), classOf("added")
	localHere, addedHere := published("here", "10Gi", "10Gi"), published("here", "0", "8Ei")
	added.Name, addedHere.Name, addedHere.StorageClassName = "added", "added-here", "added"
	h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), driverPod("here"), local, localHere)
	h.reconcile("hpp")
	h.scheduled(1, 0)
	h.reconcile("hpp")
	h.has(object)
	object.Spec.StoragePools = append(object.Spec.StoragePools, hppv1.StoragePool{Name: "added", Path: "/srv/added"})
	must.Succeed(t, h.Update(t.Context(), object), h.Create(t.Context(), added), h.Create(t.Context(), addedHere))
	object.Status.ObservedVersion, object.Status.ObservedGeneration = "v99.0.0", 1
	must.Succeed(t, h.Status().Update(t.Context(), object))
	h.reconciler.Config.Version = "v1.0.0"
	for _, serves := range []bool{true, false} {
		h.has(localHere)
		if !serves {
			localHere.Capacity, localHere.MaximumVolumeSize = addedHere.Capacity, addedHere.MaximumVolumeSize
		}
		must.Succeed(t, h.Update(t.Context(), localHere))
		h.reconcile("hpp")
		_, got := h.status()
		if got.Reason != status.ReasonDowngrade || (got.Status == metav1.ConditionTrue) != serves || (readyMetric(t) == 1) != serves || strings.Contains(got.Message, "added") {
			t.Errorf("served, but for the pool that was added: %v; %+v, the metric is %v", serves, got, readyMetric(t))
		}
	}
}

// The driver serves its pool nowhere, whatever an object that is refused asks for instead. One whose pools are not known is not known to serve any.
func TestRefusedObjectIsNotAvailableWhileThePoolOfItsDriverIsNotServed(t *testing.T) {
	for name, change := range map[string]func(*hppv1.HostPathProvisioner, *appsv1.DaemonSet){
		"it asks for the same": func(*hppv1.HostPathProvisioner, *appsv1.DaemonSet) {},
		"it asks for another pool": func(o *hppv1.HostPathProvisioner, _ *appsv1.DaemonSet) {
			o.Spec.StoragePools = []hppv1.StoragePool{{Name: "other", Path: "/srv/other"}}
		},
		"it asks for another path": func(o *hppv1.HostPathProvisioner, _ *appsv1.DaemonSet) {
			o.Spec.StoragePools[0].Path = "/srv/elsewhere"
		},
		"it asks for pathConfig too": func(o *hppv1.HostPathProvisioner, _ *appsv1.DaemonSet) {
			o.Spec.PathConfig = &hppv1.PathConfig{Path: "/srv/legacy"}
		},
		"the pools of the driver cannot be read": func(_ *hppv1.HostPathProvisioner, set *appsv1.DaemonSet) { dataDirVariable(set).Value = "[" },
		"the driver has no pools":                func(_ *hppv1.HostPathProvisioner, set *appsv1.DaemonSet) { dataDirVariable(set).Name = "OTHER" },
	} {
		t.Run(name, func(t *testing.T) {
			object := stored("hpp", 1, false)
			h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), driverPod("here"), classOf("local"), published("here", "0", "8Ei"))
			h.reconcile("hpp")
			h.scheduled(1, 0)
			h.reconcile("hpp")
			set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
			h.has(object)
			h.has(set)
			change(object, set)
			must.Succeed(t, h.Update(t.Context(), object), h.Update(t.Context(), set))
			object.Status.ObservedVersion, object.Status.ObservedGeneration = "v99.0.0", 1
			must.Succeed(t, h.Status().Update(t.Context(), object))
			h.reconciler.Config.Version = "v1.0.0"
			h.reconcile("hpp")
			if _, got := h.status(); got.Status != metav1.ConditionFalse || readyMetric(t) != 0 {
				t.Errorf("Available is %s: %s; the metric is %v", got.Status, got.Message, readyMetric(t))
			}
		})
	}
}

// dataDirVariable is the pools of a driver.
func dataDirVariable(set *appsv1.DaemonSet) *corev1.EnvVar {
	containers := set.Spec.Template.Spec.Containers
	env := containers[slices.IndexFunc(containers, func(c corev1.Container) bool { return c.Name == "driver" })].Env
	return &env[slices.IndexFunc(env, func(e corev1.EnvVar) bool { return e.Name == "DATADIR" })]
}

// A pool is lacking on all nodes of a cluster in which the driver runs on one that is not to have it any more. Each event of a pod has the object reconciled, and not
// each node read again.
func TestNodesAreNotReadWithEachEvent(t *testing.T) {
	objects := []client.Object{stored("hpp", 1, false), classOf("local")}
	for _, name := range []string{"a", "b", "c", "d"} {
		objects = append(objects, nodeThat(name, corev1.ConditionTrue), driverPod(name))
	}
	h := newHarness(t, objects...)
	h.reconcile("hpp")
	h.scheduled(3, 1)
	read := 0
	h.reconciler.APIReader = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, api client.WithWatch, key client.ObjectKey, to client.Object, options ...client.GetOption) error {
			if _, node := to.(*corev1.Node); node {
				read++
			}
			return api.Get(ctx, key, to, options...)
		},
	})
	for range 5 {
		h.reconcile("hpp")
	}
	if read != 4 {
		t.Errorf("4 nodes were read %d times", read)
	}
	h.scheduled(2, 2)
	h.reconcile("hpp")
	if read != 8 {
		t.Errorf("after the nodes that are to have it have changed, 4 nodes were read %d times", read-4)
	}
}
