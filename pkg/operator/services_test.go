package operator

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// classOf is a StorageClass for a pool.
func classOf(pool string) *storagev1.StorageClass {
	mode := storagev1.VolumeBindingWaitForFirstConsumer
	return &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: "class"}, Provisioner: render.DriverName, VolumeBindingMode: &mode,
		Parameters: map[string]string{render.PoolParameter: pool},
	}
}

// published is what external-provisioner publishes of the class on a node: the answer of GetCapacity. The largest volume is left out of
// a pool that does not serve.
func published(node, capacity, largest string) *storagev1.CSIStorageCapacity {
	quantity := func(text string) *resource.Quantity {
		if text == "" {
			return nil
		}
		q := resource.MustParse(text)
		return &q
	}
	return &storagev1.CSIStorageCapacity{
		ObjectMeta:       metav1.ObjectMeta{Namespace: "storage", Name: "csisc-" + node},
		StorageClassName: "class", Capacity: quantity(capacity), MaximumVolumeSize: quantity(largest),
		NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{"topology.hostpath.csi/node": node}},
	}
}

// The status says of a pool what the driver publishes of it, and not only that the driver's pods are ready.
func TestStatusOfPoolsThatDoNotServe(t *testing.T) {
	for name, test := range map[string]struct {
		of        []client.Object
		phase     hppv1.StoragePoolPhase
		ready     int
		available metav1.ConditionStatus
		words     string
	}{
		"no class, so that nothing is known": {nil, hppv1.StoragePoolReady, 2, metav1.ConditionTrue, ""},
		"both serve":                         {[]client.Object{classOf("local"), published("node-a", "1Gi", "1Gi"), published("node-b", "1Gi", "1Gi")}, hppv1.StoragePoolReady, 2, metav1.ConditionTrue, ""},
		"both are full":                      {[]client.Object{classOf("local"), published("node-a", "0", "0"), published("node-b", "0", "0")}, hppv1.StoragePoolReady, 2, metav1.ConditionTrue, ""},
		"a class that names no pool":         {[]client.Object{classOf(""), published("node-a", "0", ""), published("node-b", "0", "")}, hppv1.StoragePoolMounting, 0, metav1.ConditionFalse, "serves on no node"},
		"one does not serve":                 {[]client.Object{classOf("local"), published("node-a", "1Gi", "1Gi"), published("node-b", "0", "")}, hppv1.StoragePoolMounting, 1, metav1.ConditionTrue, "node-b"},
		"none serves":                        {[]client.Object{classOf("local"), published("node-a", "0", ""), published("node-b", "0", "")}, hppv1.StoragePoolMounting, 0, metav1.ConditionFalse, "node-a, node-b"},
		"the driver knows no such pool":      {[]client.Object{classOf("local"), published("node-a", "0", "8Pi"), published("node-b", "0", "8Pi")}, hppv1.StoragePoolMounting, 0, metav1.ConditionFalse, "serves on no node"},
		"of a node that left":                {[]client.Object{classOf("local"), published("node-a", "0", ""), published("node-c", "1Gi", "1Gi")}, hppv1.StoragePoolMounting, 0, metav1.ConditionFalse, "serves on no node"},
		"nothing is published yet":           {[]client.Object{classOf("local")}, hppv1.StoragePoolMounting, 0, metav1.ConditionTrue, "not published"},
		"one has not published yet":          {[]client.Object{classOf("local"), published("node-a", "1Gi", "1Gi")}, hppv1.StoragePoolMounting, 1, metav1.ConditionTrue, "1 of 2 nodes"},
		"of a class of another pool":         {[]client.Object{classOf("other"), published("node-a", "0", ""), published("node-b", "0", "")}, hppv1.StoragePoolReady, 2, metav1.ConditionTrue, ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, append(test.of, stored("hpp", 1, false), driverPod("node-a"), driverPod("node-b"),
				nodeThat("node-a", corev1.ConditionTrue), nodeThat("node-b", corev1.ConditionTrue))...)
			h.reconcile("hpp")
			h.rolledOut(2)
			h.reconcile("hpp")
			status, available := h.status()
			pool := status.StoragePoolStatuses[0]
			if pool.Phase != test.phase || pool.CurrentReady != test.ready || !strings.Contains(pool.Message, test.words) {
				t.Errorf("the pool is %s on %d nodes: %q", pool.Phase, pool.CurrentReady, pool.Message)
			}
			if available.Status != test.available {
				t.Errorf("Available is %s: %s", available.Status, available.Message)
			}
			if degraded := meta.IsStatusConditionTrue(status.Conditions, hppv1.ConditionDegraded); degraded != (test.available == metav1.ConditionFalse) {
				t.Errorf("Degraded is %v", degraded)
			}
		})
	}
}

// A pool that the driver serves only on conditions is not ready because the driver is: what it serves is known once a class names the pool.
func TestStatusOfPoolsThatServeOnConditions(t *testing.T) {
	immediate := classOf("local")
	immediate.VolumeBindingMode = nil
	served := []client.Object{classOf("local"), published("node-a", "1Gi", "1Gi"), published("node-b", "1Gi", "1Gi")}
	unmounted := []client.Object{classOf("local"), published("node-a", "0", ""), published("node-b", "0", "")}
	yes, no := true, false
	for name, test := range map[string]struct {
		pool    hppv1.StoragePool
		of      []client.Object
		phase   hppv1.StoragePoolPhase
		ready   int
		message string
	}{
		"requireMount, without a class":                {hppv1.StoragePool{RequireMount: &yes}, nil, hppv1.StoragePoolMounting, 0, "StorageClass"},
		"requireMount, with a class that is not asked": {hppv1.StoragePool{RequireMount: &yes}, []client.Object{immediate}, hppv1.StoragePoolMounting, 0, "StorageClass"},
		"requireMount, nothing mounted":                {hppv1.StoragePool{RequireMount: &yes}, unmounted, hppv1.StoragePoolMounting, 0, "serves on no node"},
		"requireMount, mounted":                        {hppv1.StoragePool{RequireMount: &yes}, served, hppv1.StoragePoolReady, 2, ""},
		"requireMount is false":                        {hppv1.StoragePool{RequireMount: &no}, nil, hppv1.StoragePoolReady, 2, ""},
		"enforcement required, without a class":        {hppv1.StoragePool{Enforcement: "required"}, nil, hppv1.StoragePoolMounting, 0, "StorageClass"},
		"enforcement required, served":                 {hppv1.StoragePool{Enforcement: "required"}, served, hppv1.StoragePoolReady, 2, ""},
		"enforcement auto":                             {hppv1.StoragePool{Enforcement: "auto"}, nil, hppv1.StoragePoolReady, 2, ""},
	} {
		t.Run(name, func(t *testing.T) {
			object := stored("hpp", 1, false)
			test.pool.Name, test.pool.Path = "local", "/var/hpvolumes"
			object.Spec.StoragePools = []hppv1.StoragePool{test.pool}
			h := newHarness(t, append(test.of, object, driverPod("node-a"), driverPod("node-b"),
				nodeThat("node-a", corev1.ConditionTrue), nodeThat("node-b", corev1.ConditionTrue))...)
			h.reconcile("hpp")
			h.rolledOut(2)
			h.reconcile("hpp")
			status, _ := h.status()
			pool := status.StoragePoolStatuses[0]
			if pool.Phase != test.phase || pool.CurrentReady != test.ready || (pool.Message == "") != (test.message == "") || !strings.Contains(pool.Message, test.message) {
				t.Errorf("the pool is %s on %d nodes: %q", pool.Phase, pool.CurrentReady, pool.Message)
			}
			// What is not known does not keep an installation from being rolled out.
			if test.message == "StorageClass" && !meta.IsStatusConditionTrue(status.Conditions, hppv1.ConditionRolledOut) {
				t.Error("it is not rolled out")
			}
		})
	}
}

// A change of the number alone is no reason to check everything, or large clusters would do nothing else.
func TestOnlyChangesOfServiceCount(t *testing.T) {
	convert := func(capacity *storagev1.CSIStorageCapacity) client.Object {
		live, err := render.Convert(capacity)
		must.Succeed(t, err)
		return live
	}
	changes := func(from, to *storagev1.CSIStorageCapacity) bool {
		return servesElsewise().Update(event.UpdateEvent{ObjectOld: convert(from), ObjectNew: convert(to)})
	}
	if changes(published("node-a", "1Gi", "1Gi"), published("node-a", "0", "0")) {
		t.Error("a full pool counts as a change")
	}
	if !changes(published("node-a", "0", "0"), published("node-a", "0", "")) {
		t.Error("a pool that ceases to be served does not count as a change")
	}
}
