package provisioner

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// node reads this instance's Node object. Its hostname label may differ from its name, and is what pods are placed by.
func (p *Provisioner) node(ctx context.Context) (*corev1.Node, error) {
	node, err := p.client.CoreV1().Nodes().Get(ctx, p.config.Node, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read node %s: %w", p.config.Node, err)
	}
	if node.Labels[corev1.LabelHostname] == "" {
		return nil, fmt.Errorf("node %s has no label %s, which PersistentVolumes are bound to nodes by: set it", p.config.Node, corev1.LabelHostname)
	}
	return node, nil
}

// refuseOtherNodes refuses, in SingleNode mode, a cluster in which pods could run on a node that has another directory at the same
// path.
func (p *Provisioner) refuseOtherNodes(ctx context.Context) error {
	if p.config.Mode != SingleNode || p.config.Shared {
		return nil
	}
	nodes, err := p.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	var schedulable []string
	for _, node := range nodes.Items {
		if isSchedulable(&node) {
			schedulable = append(schedulable, node.Name)
		}
	}
	if len(schedulable) <= 1 {
		return nil
	}
	slices.Sort(schedulable)
	return fmt.Errorf("pods can run on %d nodes (%s) and would find another directory on each: use --mode=%s in a DaemonSet, "+
		"or set PV_DIR_SHARED=true if %s is the same directory on all of them", len(schedulable), shorten(schedulable), PerNode, p.config.Path)
}

func shorten(names []string) string {
	const most = 5
	if len(names) > most {
		names = append(slices.Clone(names[:most]), "...")
	}
	return strings.Join(names, ", ")
}

// isSchedulable reports whether an ordinary pod can be placed on a node. A node that is only not ready now will be.
func isSchedulable(node *corev1.Node) bool {
	if node.Spec.Unschedulable {
		return false
	}
	return !slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool {
		return taint.Effect != corev1.TaintEffectPreferNoSchedule && !strings.HasPrefix(taint.Key, "node.kubernetes.io/")
	})
}
