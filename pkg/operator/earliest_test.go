package operator

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// Before version 0.8 the upstream operator called its DaemonSet as the object, which owns it (createDaemonSetObject of its
// pkg/controller/hostpathprovisioner/daemonset.go, v0.7.0). A later version removes it, which a takeover from an early one does not pass.
func TestDaemonSetOfEarlyVersionIsReported(t *testing.T) {
	for name, test := range map[string]struct {
		set, namespace, kind string
		uid                  types.UID
		reported             bool
	}{
		"of this object":                    {"hpp", "storage", "HostPathProvisioner", "uid of hpp", true},
		"of an earlier object of this name": {"hpp", "storage", "HostPathProvisioner", "uid of another", false},
		"of another kind":                   {"hpp", "storage", "Other", "uid of hpp", false},
		"in another namespace":              {"hpp", "elsewhere", "HostPathProvisioner", "uid of hpp", false},
		"that is deployed now":              {render.DriverDaemonSet, "storage", "HostPathProvisioner", "uid of hpp", false},
	} {
		t.Run(name, func(t *testing.T) {
			set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{
				Namespace: test.namespace, Name: test.set, Labels: map[string]string{"k8s-app": "hpp"},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "hostpathprovisioner.kubevirt.io/v1beta1", Kind: test.kind, Name: "hpp", UID: test.uid}},
			}, Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"k8s-app": "hpp"}}}}
			h := newHarness(t, stored("hpp", 1, false), set, driverPod("node-a"), nodeThat("node-a", corev1.ConditionTrue))
			h.reconcile("hpp")
			h.rolledOut(1)
			h.reconcile("hpp")
			_, available := h.status()
			if said := strings.Contains(available.Message, "kubectl -n storage delete daemonset hpp"); said != test.reported {
				t.Errorf("Available says %q", available.Message)
			}
			if !h.has(set) {
				t.Error("the DaemonSet is gone")
			}
		})
	}
}
