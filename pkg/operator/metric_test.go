package operator

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	appsv1 "k8s.io/api/apps/v1"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
)

// The metric is 0 whenever the object is not available, also while something is still being rolled out.
func TestReadyMetric(t *testing.T) {
	defer ready.Set(noObject)
	for nodes, want := range map[int32]float64{0: 0, 1: 0, 2: 1} {
		set := &appsv1.DaemonSet{Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: 2, UpdatedNumberScheduled: 2, NumberReady: nodes}}
		measure(status.Assess(&hppv1.HostPathProvisioner{}, "v1", status.Observed{DaemonSets: map[string]*appsv1.DaemonSet{render.DriverDaemonSet: set}}))
		if got := readyMetric(t); got != want {
			t.Errorf("with %d of 2 nodes ready the metric is %v, want %v", nodes, got, want)
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
