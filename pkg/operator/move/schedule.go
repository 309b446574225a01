package move

import (
	"fmt"
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
	if c.class != nil {
		if why := schedule.NotAllowed(c.class, node, place.TopologyKey); why != "" {
			return why
		}
	}
	return schedule.Refuses(c.pods, node, schedule.Neighbours{Pods: c.beside, Nodes: c.nodes})
}

func join(of []string) string { return strings.Join(of, ", ") }
