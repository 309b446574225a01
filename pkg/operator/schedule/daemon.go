package schedule

import (
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// Chooses says whether a DaemonSet is to have a pod on a node, as its controller decides it: a pod that runs on another one is misscheduled.
func Chooses(set *appsv1.DaemonSet, node *corev1.Node) bool {
	pod := &corev1.Pod{Spec: set.Spec.Template.Spec}
	pod.Spec.Tolerations = append(slices.Clone(pod.Spec.Tolerations), daemonTolerations...)
	return Selects(pod, node) && !slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool {
		return t.Effect != corev1.TaintEffectPreferNoSchedule && !tolerates(pod, &t)
	})
}

// daemonTolerations are those that the controller of DaemonSets adds for pods that have a network of their own (AddOrUpdateDaemonPodTolerations).
var daemonTolerations = []corev1.Toleration{
	{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
	{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
	{Key: corev1.TaintNodeDiskPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
	{Key: corev1.TaintNodeMemoryPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
	{Key: corev1.TaintNodePIDPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
	{Key: corev1.TaintNodeUnschedulable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
}
