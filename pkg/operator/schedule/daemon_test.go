package schedule_test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/pkg/operator/schedule"
)

// A DaemonSet is to have pods where its selector, its affinity and the taints let them, and on nodes that have a problem for a while.
func TestChooses(t *testing.T) {
	set := &appsv1.DaemonSet{}
	set.Spec.Template.Spec = corev1.PodSpec{
		NodeSelector: map[string]string{"zone": "1"}, Tolerations: []corev1.Toleration{{Key: "storage", Operator: corev1.TolerationOpExists}},
	}
	for name, c := range map[string]struct {
		zone   string
		taints []corev1.Taint
		want   bool
	}{
		"it selects the node":    {"1", nil, true},
		"it does not":            {"2", nil, false},
		"a taint":                {"1", []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}, false},
		"a taint that evicts":    {"1", []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoExecute}}, false},
		"a taint that prefers":   {"1", []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectPreferNoSchedule}}, true},
		"a taint of its own":     {"1", []corev1.Taint{{Key: "storage", Effect: corev1.TaintEffectNoExecute}}, true},
		"the node is cordoned":   {"1", []corev1.Taint{{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}}, true},
		"the node is down":       {"1", []corev1.Taint{{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoExecute}}, true},
		"the node has no memory": {"1", []corev1.Taint{{Key: corev1.TaintNodeMemoryPressure, Effect: corev1.TaintEffectNoSchedule}}, true},
	} {
		at := node("node-a", c.zone)
		at.Spec.Taints, at.Spec.Unschedulable = c.taints, name == "the node is cordoned"
		if got := schedule.Chooses(set, &at); got != c.want {
			t.Errorf("%s: it says %v", name, got)
		}
	}
	if len(set.Spec.Template.Spec.Tolerations) != 1 {
		t.Error("the DaemonSet has been changed")
	}
}
