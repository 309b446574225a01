package operator

import (
	"os"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// upstreamObject is an object as the upstream operator leaves it.
func upstreamObject(t *testing.T) *unstructured.Unstructured {
	t.Helper()
	text, err := os.ReadFile("testdata/upstream-object.yaml")
	must.Succeed(t, err)
	object := &unstructured.Unstructured{}
	must.Succeed(t, yaml.Unmarshal(text, &object.Object))
	return object
}

// upstreamDaemonSet is that of the upstream operator, on two nodes (createCSIDaemonSetObject of its
// pkg/controller/hostpathprovisioner/daemonset.go, v0.23.0).
func upstreamDaemonSet() *appsv1.DaemonSet {
	labels := map[string]string{render.AppLabel: render.App}
	return &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet, Labels: render.Owned},
		Spec:       appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}},
		Status:     appsv1.DaemonSetStatus{DesiredNumberScheduled: 2, CurrentNumberScheduled: 2, NumberReady: 2},
	}
}

// The version that the upstream operator has rolled out is higher than ours, and not of ours: whatever is written to the status, it never counts
// as a downgrade, and ours counts from the first rollout on.
func TestTakeoverIsNoDowngrade(t *testing.T) {
	h := newHarness(t, upstreamObject(t), upstreamDaemonSet())
	h.reconciler.Config.Version = "v0.1.0"
	h.reconcile("hpp")
	h.reconcile("hpp")
	if got, _ := h.status(); meta.FindStatusCondition(got.Conditions, hppv1.ConditionDegraded).Reason == status.ReasonDowngrade {
		t.Fatalf("the takeover is refused: %+v", got)
	}
	h.rolledOut(2)
	h.reconcile("hpp")
	h.reconcile("hpp")
	if got, available := h.status(); got.ObservedVersion != "v0.1.0" || available.Status != metav1.ConditionTrue {
		t.Fatalf("%s is observed, and Available is %s: %s", got.ObservedVersion, available.Status, available.Message)
	}
	h.reconciler.Config.Version = "v0.0.9"
	h.reconcile("hpp")
	if got, _ := h.status(); meta.FindStatusCondition(got.Conditions, hppv1.ConditionDegraded).Reason != status.ReasonDowngrade {
		t.Errorf("a downgrade of our own is not refused: %+v", got)
	}
}

// What is refused, or ignored as a second object, is no downgrade later either.
func TestRefusedTakeoverIsNoDowngradeLater(t *testing.T) {
	object := upstreamObject(t)
	unstructured.RemoveNestedField(object.Object, "spec", "storagePools")
	h := newHarness(t, object)
	h.reconciler.Config.Version = "v0.1.0"
	h.reconcile("hpp")
	if got, _ := h.status(); meta.FindStatusCondition(got.Conditions, hppv1.ConditionDegraded).Reason != status.ReasonPools {
		t.Fatalf("the status is %+v", got)
	}
	fixed := stored("hpp", 1, false)
	h.has(fixed)
	fixed.Spec.StoragePools = []hppv1.StoragePool{{Name: "local", Path: "/var/hpvolumes"}}
	must.Succeed(t, h.Update(t.Context(), fixed))
	h.reconcile("hpp")
	if got, _ := h.status(); meta.FindStatusCondition(got.Conditions, hppv1.ConditionDegraded).Reason == status.ReasonDowngrade {
		t.Errorf("the takeover is refused: %+v", got)
	}
}
