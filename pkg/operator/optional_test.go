package operator

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Kinds are watched while the cluster has them, and not asked for when it has not. Without an answer nothing changes.
func TestOptionalKindsComeAndGo(t *testing.T) {
	var kinds OptionalKinds
	var has, watched []schema.GroupVersionKind
	var down error
	discover := func() error {
		return kinds.discover(
			func(kind schema.GroupVersionKind) (bool, error) { return slices.Contains(has, kind), down },
			func(kind schema.GroupVersionKind) error { watched = append(watched, kind); return nil },
			func(kind schema.GroupVersionKind) error {
				watched = slices.DeleteFunc(watched, func(k schema.GroupVersionKind) bool { return k == kind })
				return nil
			},
		)
	}
	for _, now := range [][]schema.GroupVersionKind{
		nil, {constraintsKind}, {constraintsKind, serviceMonitorKind, place.SnapshotContent}, {serviceMonitorKind}, nil, {constraintsKind},
	} {
		has = now
		must.Succeed(t, discover())
		want := slices.DeleteFunc(slices.Clone(now), func(k schema.GroupVersionKind) bool { return k == place.SnapshotContent })
		if !slices.Equal(watched, want) || !slices.Equal(kinds.Present(), want) || kinds.Has(place.SnapshotContent) != slices.Contains(now, place.SnapshotContent) {
			t.Errorf("of %v are watched %v, used %v, snapshots %v", now, watched, kinds.Present(), kinds.Has(place.SnapshotContent))
		}
	}
	has, down = nil, errors.New("the API server is down")
	if err := discover(); !errors.Is(err, down) || len(watched) != 1 || !kinds.Has(constraintsKind) {
		t.Errorf("without an answer: %v, watched %v", err, watched)
	}
}

// Without an answer to which kinds the cluster has nothing is done at first, and it is asked again at once. Later what is deployed does not
// depend on it: only what is new waits.
func TestKindsAreAskedForUntilTheyAreKnown(t *testing.T) {
	h := newHarness(t, stored("hpp", 1, false))
	down, asked := errors.New("the API server is down"), 0
	h.reconciler.kinds.ask = func(context.Context) error { asked++; return down }
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
	request := ctrl.Request{NamespacedName: client.ObjectKey{Name: "hpp"}}
	for range 2 {
		if _, err := h.reconciler.Reconcile(t.Context(), request); !errors.Is(err, down) || h.has(set) {
			t.Fatalf("it ends with %v", err)
		}
	}
	if asked != 2 {
		t.Errorf("it asked %d times", asked)
	}
	h.reconciler.kinds.ask = func(context.Context) error { return nil }
	h.reconcile("hpp")
	must.Succeed(t, h.Delete(t.Context(), set))
	h.reconciler.kinds.last = time.Time{}
	h.reconciler.kinds.ask = func(context.Context) error { return down }
	if _, err := h.reconciler.Reconcile(t.Context(), request); !errors.Is(err, down) || !h.has(set) {
		t.Errorf("it ends with %v, and the driver is there: %v", err, h.has(set))
	}
}

// Labels are copied with what they are on. What the operator has not made it does not remove.
func TestOnlyWhatItMadeIsRemoved(t *testing.T) {
	// Its name is one that the operator may remove.
	copied := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "hostpath-provisioner-metrics", Labels: render.Owned}}
	upstream := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "hostpath-provisioner-health-check", Labels: render.Owned,
		Annotations: map[string]string{"hostpathprovisioner.kubevirt.io/lastAppliedConfiguration": "{}"}}}
	h := newHarness(t, stored("hpp", 1, false), copied, upstream)
	h.reconcile("hpp")
	if !h.has(copied) || h.has(upstream) {
		t.Errorf("the user's is there: %v, that of the upstream operator: %v", h.has(copied), h.has(upstream))
	}
	must.Succeed(t, h.Delete(t.Context(), stored("hpp", 1, false)))
	h.reconcile("hpp")
	if found := h.owned(); len(found) != 1 || !h.has(copied) {
		t.Errorf("there are %d objects afterwards", len(found))
	}
}

// A pod of the driver on a node that is not chosen any more, but that it was not evicted from, does not keep the pools of other nodes
// that left.
func TestMisscheduledPodDoesNotKeepOthers(t *testing.T) {
	left := mounterOf("local", "left")
	h := newHarness(t, onClaims(), nodeThat("here", corev1.ConditionTrue), nodeThat("tainted", corev1.ConditionTrue), nodeThat("left", corev1.ConditionTrue),
		driverPod("here"), driverPod("tainted"), left)
	h.reconcile("hpp")
	h.scheduled(1, 1)
	h.reconcile("hpp")
	if h.replicas(left) != 0 {
		t.Error("the mounter on the node that left goes on")
	}
	if !h.has(mounterOf("local", "tainted")) {
		t.Error("the pool has no mounter where the driver still runs")
	}
}
