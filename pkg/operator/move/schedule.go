package move

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
)

// unschedulable says why the scheduler would not have the pods of the claim run on a node. It is a part of the scheduler's filters: those
// that hold for long.
func (c *candidates) unschedulable(node *corev1.Node) string {
	if node.Spec.Unschedulable {
		return fmt.Sprintf("node %s is cordoned", node.Name)
	}
	for _, v := range c.bound {
		if !reaches(node, v) {
			return fmt.Sprintf("node %s does not reach the volume %s, which pods use too", node.Name, v.Name)
		}
	}
	if c.class != nil && !allowed(node, c.class.AllowedTopologies) {
		return fmt.Sprintf("node %s is not in the topologies that the StorageClass %s allows", node.Name, c.class.Name)
	}
	for i := range c.pods {
		pod := &c.pods[i]
		if !selects(pod, node) {
			return fmt.Sprintf("pod %s may not run on node %s by its node selector or affinity", pod.Name, node.Name)
		}
	}
	for i := range node.Spec.Taints {
		taint := &node.Spec.Taints[i]
		if taint.Effect == corev1.TaintEffectPreferNoSchedule {
			continue
		}
		if len(c.pods) == 0 {
			return fmt.Sprintf("node %s has the taint %s", node.Name, taint.Key)
		}
		for _, pod := range c.pods {
			if !slices.ContainsFunc(pod.Spec.Tolerations, func(t corev1.Toleration) bool { return t.ToleratesTaint(klog.Background(), taint, true) }) {
				return fmt.Sprintf("pod %s does not tolerate the taint %s of node %s", pod.Name, taint.Key, node.Name)
			}
		}
	}
	return ""
}

// allowed says whether a node is in one of the topologies.
func allowed(node *corev1.Node, topologies []corev1.TopologySelectorTerm) bool {
	return len(topologies) == 0 || slices.ContainsFunc(topologies, func(term corev1.TopologySelectorTerm) bool {
		return !slices.ContainsFunc(term.MatchLabelExpressions, func(e corev1.TopologySelectorLabelRequirement) bool {
			value := node.Labels[e.Key]
			if e.Key == place.TopologyKey {
				value = node.Name
			}
			return !slices.Contains(e.Values, value)
		})
	})
}

// selects says whether a pod wants to run on a node. The volume itself is no reason: its affinity changes.
func selects(pod *corev1.Pod, node *corev1.Node) bool {
	if !labels.SelectorFromSet(pod.Spec.NodeSelector).Matches(labels.Set(node.Labels)) {
		return false
	}
	affinity := pod.Spec.Affinity
	if affinity == nil || affinity.NodeAffinity == nil || affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return true
	}
	return selected(affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms, node.Name, node.Labels)
}

// selected says whether one of the terms holds for a node with labels.
func selected(terms []corev1.NodeSelectorTerm, node string, has labels.Set) bool {
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

func join(of []string) string { return strings.Join(of, ", ") }
