// Package schedule says which volumes pods use together, and whether the scheduler would have pods run on a node. It is a part of its filters:
// those that hold for long.
package schedule

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/klog/v2"
)

// Refuses says why one of the pods, which go to a node together, could not run there beside others; empty for nothing. Where there are none,
// it is asked for a pod that tolerates nothing.
func Refuses(pods []corev1.Pod, node *corev1.Node, beside Neighbours) string {
	if node.Spec.Unschedulable {
		return fmt.Sprintf("node %s is cordoned", node.Name)
	}
	for i := range pods {
		pod := &pods[i]
		if !Selects(pod, node) {
			return fmt.Sprintf("pod %s may not run on node %s by its node selector or affinity", pod.Name, node.Name)
		}
	}
	for i := range node.Spec.Taints {
		taint := &node.Spec.Taints[i]
		if taint.Effect == corev1.TaintEffectPreferNoSchedule {
			continue
		}
		if len(pods) == 0 {
			return fmt.Sprintf("node %s has the taint %s", node.Name, taint.Key)
		}
		for _, pod := range pods {
			if !tolerates(&pod, taint) {
				return fmt.Sprintf("pod %s does not tolerate the taint %s of node %s", pod.Name, taint.Key, node.Name)
			}
		}
	}
	return beside.refuse(pods, node)
}

func tolerates(pod *corev1.Pod, taint *corev1.Taint) bool {
	return slices.ContainsFunc(pod.Spec.Tolerations, func(t corev1.Toleration) bool { return t.ToleratesTaint(klog.Background(), taint, true) })
}

// NotAllowed says that a StorageClass does not allow its volumes on a node; empty where it does. The key is that of the topologies whose value
// is the name of a node.
func NotAllowed(class *storagev1.StorageClass, node *corev1.Node, key string) string {
	allowed := len(class.AllowedTopologies) == 0 || slices.ContainsFunc(class.AllowedTopologies, func(term corev1.TopologySelectorTerm) bool {
		return !slices.ContainsFunc(term.MatchLabelExpressions, func(e corev1.TopologySelectorLabelRequirement) bool {
			value := node.Labels[e.Key]
			if e.Key == key {
				value = node.Name
			}
			return !slices.Contains(e.Values, value)
		})
	})
	if allowed {
		return ""
	}
	return fmt.Sprintf("node %s is not in the topologies that the StorageClass %s allows", node.Name, class.Name)
}

// Selects says whether a pod wants to run on a node. The volume itself is no reason: its affinity changes.
func Selects(pod *corev1.Pod, node *corev1.Node) bool {
	if !labels.SelectorFromSet(pod.Spec.NodeSelector).Matches(labels.Set(node.Labels)) {
		return false
	}
	affinity := pod.Spec.Affinity
	if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return true
	}
	return Selected(affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms, node.Name, node.Labels)
}

// Selected says whether one of the terms holds for a node with labels.
func Selected(terms []corev1.NodeSelectorTerm, node string, has labels.Set) bool {
	return slices.ContainsFunc(terms, func(t corev1.NodeSelectorTerm) bool {
		fields := labels.Set{"metadata.name": node}
		return len(t.MatchExpressions)+len(t.MatchFields) > 0 && match(t.MatchExpressions, has) && match(t.MatchFields, fields)
	})
}

var operators = map[corev1.NodeSelectorOperator]selection.Operator{
	corev1.NodeSelectorOpIn: selection.In, corev1.NodeSelectorOpNotIn: selection.NotIn, corev1.NodeSelectorOpExists: selection.Exists,
	corev1.NodeSelectorOpDoesNotExist: selection.DoesNotExist, corev1.NodeSelectorOpGt: selection.GreaterThan, corev1.NodeSelectorOpLt: selection.LessThan,
}

// match says whether all expressions hold. One that cannot be understood does not.
func match(expressions []corev1.NodeSelectorRequirement, of labels.Set) bool {
	return !slices.ContainsFunc(expressions, func(e corev1.NodeSelectorRequirement) bool {
		requirement, err := labels.NewRequirement(e.Key, operators[e.Operator], e.Values)
		return err != nil || !requirement.Matches(of)
	})
}
