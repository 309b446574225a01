package move

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/schedule"
)

// unschedulable says why the scheduler would not have the pods of the claim run on a node.
func (c *candidates) unschedulable(node *corev1.Node) string {
	for _, v := range c.bound {
		if !reaches(node, v) {
			return fmt.Sprintf("node %s does not reach the volume %s, which pods use too", node.Name, v.Name)
		}
	}
	if c.class != nil && !allowed(node, c.class.AllowedTopologies) {
		return fmt.Sprintf("node %s is not in the topologies that the StorageClass %s allows", node.Name, c.class.Name)
	}
	return schedule.Refuses(c.pods, node)
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

func join(of []string) string { return strings.Join(of, ", ") }
