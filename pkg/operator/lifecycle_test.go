package operator

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	movev1 "kubevirt.io/hostpath-provisioner/api/v1alpha1"
	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A harness is a cluster without nodes that do anything: pods, nodes and Jobs are what a test makes of them.
type harness struct {
	t *testing.T
	client.Client
	reconciler *Reconciler
}

func newHarness(t *testing.T, objects ...client.Object) *harness {
	t.Helper()
	// No other kinds: with each write the fake client lists all that there are.
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		appsv1.AddToScheme, batchv1.AddToScheme, corev1.AddToScheme, networkingv1.AddToScheme, rbacv1.AddToScheme, storagev1.AddToScheme,
		hppv1.AddToScheme, movev1.AddToScheme,
	} {
		must.Succeed(t, add(scheme))
	}
	manifests, err := render.Load()
	must.Succeed(t, err)
	api := fake.NewClientBuilder().WithScheme(scheme).WithReturnManagedFields().WithStatusSubresource(&hppv1.HostPathProvisioner{}).WithObjects(objects...).Build()
	t.Cleanup(func() { ready.Set(noObject) })
	return &harness{t: t, Client: api, reconciler: &Reconciler{
		Client: api, APIReader: api, Recorder: events.NewFakeRecorder(1000), Optional: &OptionalKinds{}, TLS: NewTLSPolicy("", ""),
		Config:    render.Config{Namespace: "storage", Version: "v1", Verbosity: -1},
		manifests: manifests, kinds: kindDiscovery{ask: func(context.Context) error { return nil }},
	}}
}

func (h *harness) reconcile(name string) {
	h.t.Helper()
	if _, err := h.reconciler.Reconcile(h.t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: name}}); err != nil {
		h.t.Fatal(err)
	}
}

// attempt is reconcile where an error may be what is looked for.
func (h *harness) attempt(name string) {
	h.t.Helper()
	_, err := h.reconciler.Reconcile(h.t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: name}})
	h.t.Log("reconciled with", err)
}

// has says whether an object is there, and reads it.
func (h *harness) has(object client.Object) bool {
	h.t.Helper()
	err := h.Get(h.t.Context(), client.ObjectKeyFromObject(object), object)
	if err != nil && !apierrors.IsNotFound(err) {
		h.t.Fatal(err)
	}
	return err == nil
}

func stored(name string, created int64, deleted bool) *hppv1.HostPathProvisioner {
	o := &hppv1.HostPathProvisioner{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID("uid of " + name), Generation: 1, CreationTimestamp: metav1.Unix(created, 0), Finalizers: []string{hppv1.Finalizer},
	}}
	o.Spec.StoragePools = []hppv1.StoragePool{{Name: "local", Path: "/var/hpvolumes"}}
	// Where mounterOf has its pools.
	for _, pool := range []string{"local", "old", "outer", "inner", "one", "two"} {
		o.Status.MountedPools = append(o.Status.MountedPools, hppv1.MountedPool{Name: pool, Path: "/mnt/" + pool})
	}
	if deleted {
		now := metav1.Now()
		o.DeletionTimestamp = &now
	}
	return o
}

// mounterOf is what keeps a pool mounted on a node.
func mounterOf(pool, node string) *appsv1.Deployment {
	one := int32(1)
	labels := render.PoolLabels(pool)
	for key, value := range render.Owned {
		labels[key] = value
	}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "hpp-pool-" + pool + "-" + node, Labels: labels, Annotations: map[string]string{
			"hostpathprovisioner.kubevirt.io/node": node, "hostpathprovisioner.kubevirt.io/path": "/mnt/" + pool,
		}},
		Spec: appsv1.DeploymentSpec{Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: render.PoolLabels(pool)}},
	}
}

func cleanUpOf(mounter *appsv1.Deployment) *batchv1.Job {
	return &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.CleanUpName(mounter.Name)}}
}

func nodeThat(name string, ready corev1.ConditionStatus) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelOSStable: "linux"}}, Status: corev1.NodeStatus{
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}},
	}}
}

// A kubelet that restarts is not ready for a moment. What is mounted there is unmounted when it is back, as on any node.
func TestDeletionWaitsForNodeThatIsBrieflyNotReady(t *testing.T) {
	mounter := mounterOf("local", "here")
	mounter.Spec.Replicas = new(int32)
	node := nodeThat("here", corev1.ConditionUnknown)
	now := time.Now().Truncate(time.Second)
	node.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now)
	h := newHarness(t, stored("hpp", 1, true), node, mounter)
	h.reconciler.Now = func() time.Time { return now.Add(lostAfter - time.Second) }
	ready.Set(1)
	h.reconcile("hpp")
	if said := h.waitsFor(); !h.has(mounter) || !strings.Contains(said, "the node is not ready") {
		t.Fatalf("the mounter is there: %v, the object waits for %q", h.has(mounter), said)
	}
	if is := metric(t); is != 0 {
		t.Errorf("the metric of an object that is not available any more is %v", is)
	}
	h.reconciler.Now = func() time.Time { return now.Add(lostAfter) }
	h.reconcile("hpp")
	h.reconcile("hpp")
	if h.has(mounter) || h.has(stored("hpp", 1, true)) {
		t.Error("the deletion waits for a node that may never be back")
	}
}

// metric is what the operator says of its object.
func metric(t *testing.T) float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	must.Succeed(t, registry.Register(ready))
	return must.Value(registry.Gather())(t)[0].GetMetric()[0].GetGauge().GetValue()
}

// Neither a node that is gone nor one that is not ready keeps an object from being deleted.
func TestDeletionDoesNotWaitForNodes(t *testing.T) {
	gone, down := mounterOf("local", "gone"), mounterOf("local", "down")
	h := newHarness(t, stored("hpp", 1, true), nodeThat("down", corev1.ConditionUnknown), gone, down)
	h.reconcile("hpp")
	h.reconcile("hpp")
	if h.has(stored("hpp", 1, true)) || h.has(gone) || h.has(down) {
		t.Error("the object or one of its mounters is still there")
	}
}

// An object that was stored before its CRD had rules may have no spec, or name its pools in both ways. It neither stops what is
// deployed nor counts as available.
func TestObjectWithInvalidPools(t *testing.T) {
	for name, test := range map[string]struct {
		spec hppv1.HostPathProvisionerSpec
		want string
	}{
		"none": {hppv1.HostPathProvisionerSpec{}, "set storagePools"},
		"both": {hppv1.HostPathProvisionerSpec{PathConfig: &hppv1.PathConfig{Path: "/var/old"}, StoragePools: onClaims().Spec.StoragePools}, "remove one"},
	} {
		t.Run(name, func(t *testing.T) {
			mounter, object := mounterOf("local", "node-a"), stored("hpp", 1, false)
			object.Spec = test.spec
			h := newHarness(t, object, nodeThat("node-a", corev1.ConditionTrue), mounter)
			h.reconcile("hpp")
			h.has(object)
			for kind, want := range map[string]metav1.ConditionStatus{hppv1.ConditionAvailable: metav1.ConditionFalse, hppv1.ConditionDegraded: metav1.ConditionTrue} {
				if c := meta.FindStatusCondition(object.Status.Conditions, kind); c == nil || c.Status != want || !strings.Contains(c.Message, test.want) {
					t.Errorf("the condition %s is %+v, want %s and %q", kind, c, want, test.want)
				}
			}
			if h.has(mounter); *mounter.Spec.Replicas != 1 {
				t.Error("a mounter is stopped")
			}
		})
	}
}

// A second object does not keep the first from being deleted, and then counts.
func TestSecondObjectDoesNotBlockDeletionOfTheFirst(t *testing.T) {
	h := newHarness(t, stored("first", 1, true), stored("second", 2, false))
	h.reconcile("first")
	if h.has(stored("first", 1, true)) {
		t.Fatal("the first object is still there")
	}
	h.reconcile("second")
	if !h.has(&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}) {
		t.Error("the second object is not deployed")
	}
}

// A pool is unmounted only after its mounter has stopped, which would mount it again, and of several pools on several nodes no
// Job is left over.
func TestCleanUpWaitsForMounterToStop(t *testing.T) {
	var objects []client.Object
	var mounters []*appsv1.Deployment
	var pods []*corev1.Pod
	for _, node := range []string{"node-a", "node-b"} {
		objects = append(objects, nodeThat(node, corev1.ConditionTrue))
		for _, pool := range []string{"one", "two"} {
			mounter := mounterOf(pool, node)
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: mounter.Name, Labels: mounter.Labels}, Spec: corev1.PodSpec{NodeName: node}}
			objects, mounters, pods = append(objects, mounter, pod), append(mounters, mounter), append(pods, pod)
		}
	}
	h := newHarness(t, append(objects, stored("hpp", 1, true))...)
	h.reconcile("hpp")
	h.reconcile("hpp")
	for _, mounter := range mounters {
		if !h.has(mounter) || *mounter.Spec.Replicas != 0 || h.has(cleanUpOf(mounter)) {
			t.Fatalf("%s is not ended before it is unmounted", mounter.Name)
		}
	}
	for _, pod := range pods {
		must.Succeed(h.t, h.Delete(t.Context(), pod))
	}
	h.reconcile("hpp")
	for _, mounter := range mounters {
		job := cleanUpOf(mounter)
		if !h.has(job) || !h.has(mounter) {
			t.Fatalf("%s is not unmounted", mounter.Name)
		}
		job.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobComplete, Status: corev1.ConditionTrue}}
		must.Succeed(h.t, h.Status().Update(t.Context(), job))
	}
	h.reconcile("hpp")
	h.reconcile("hpp")
	for _, mounter := range mounters {
		if h.has(mounter) || h.has(cleanUpOf(mounter)) {
			t.Errorf("%s or its clean-up is left over", mounter.Name)
		}
	}
	if h.has(stored("hpp", 1, true)) {
		t.Error("the object is still there")
	}
}

// An account that was deleted is made anew, and the DaemonSet stays: its pods, whose tokens are of the account from before,
// are replaced one after the other.
func TestDeletedAccountIsReplacedAlone(t *testing.T) {
	const annotation = "hostpathprovisioner.kubevirt.io/account"
	h := newHarness(t, stored("hpp", 1, false))
	account := func(uid types.UID) *corev1.ServiceAccount {
		return &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "hostpath-provisioner-admin-csi", UID: uid}}
	}
	must.Succeed(h.t, h.Create(t.Context(), account("first")))
	h.reconcile("hpp")
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
	if !h.has(set) || set.Spec.Template.Annotations[annotation] != "first" {
		t.Fatalf("the pods are not those of the account: %v", set.Spec.Template.Annotations)
	}
	before := set.ResourceVersion
	h.reconcile("hpp")
	if !h.has(set) || set.ResourceVersion != before {
		t.Error("the DaemonSet was written although its account is the same")
	}

	set.Annotations["example.com/mark"] = "the same DaemonSet"
	must.Succeed(h.t, h.Update(t.Context(), set))
	must.Succeed(h.t, h.Delete(t.Context(), account("")))
	h.reconcile("hpp")
	if !h.has(account("")) || !h.has(set) || set.Annotations["example.com/mark"] == "" {
		t.Fatal("the account is not back, or the DaemonSet is another one")
	}
	must.Succeed(h.t, h.Delete(t.Context(), account("")))
	must.Succeed(h.t, h.Create(t.Context(), account("second")))
	h.reconcile("hpp")
	if !h.has(set) || set.Spec.Template.Annotations[annotation] != "second" || set.Annotations["example.com/mark"] == "" {
		t.Errorf("the pods have tokens of the account from before: %v", set.Spec.Template.Annotations)
	}
}
