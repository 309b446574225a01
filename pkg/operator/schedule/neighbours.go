package schedule

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Neighbours are pods that run, and the nodes of the cluster.
type Neighbours struct {
	Pods  []corev1.Pod
	Nodes []corev1.Node
}

// refuse says why some pods, which go to a node together, could not run there beside others, by their required terms or those of the others.
func (n Neighbours) refuse(pods []corev1.Pod, node *corev1.Node) string {
	var others []*corev1.Pod
	for i := range n.Pods {
		if other := &n.Pods[i]; other.Spec.NodeName != "" && !slices.ContainsFunc(pods, func(p corev1.Pod) bool { return p.Namespace == other.Namespace && p.Name == other.Name }) {
			others = append(others, other)
		}
	}
	for i := range pods {
		pod := &pods[i]
		for _, other := range others {
			if n.repels(pod, other, other, node) || n.repels(other, pod, other, node) {
				return fmt.Sprintf("pod %s may not run on node %s, by the anti-affinity to pod %s", pod.Name, node.Name, other.Name)
			}
		}
		for _, term := range attracts(pod) {
			if !n.satisfied(term, pod, pods, others, node) {
				return fmt.Sprintf("pod %s may not run on node %s, by its affinity to pods that run elsewhere", pod.Name, node.Name)
			}
		}
	}
	return ""
}

// repels says whether a pod keeps another from running with it, one of which runs already and one would run on a node.
func (n Neighbours) repels(pod, another, runs *corev1.Pod, node *corev1.Node) bool {
	if pod.Spec.Affinity == nil || pod.Spec.Affinity.PodAntiAffinity == nil {
		return false
	}
	return slices.ContainsFunc(pod.Spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution, func(term corev1.PodAffinityTerm) bool {
		return isAbout(&term, pod, another) && n.isNear(runs, node, term.TopologyKey)
	})
}

// attracts are the required terms of a pod about pods that it runs with.
func attracts(pod *corev1.Pod) []corev1.PodAffinityTerm {
	if pod.Spec.Affinity == nil || pod.Spec.Affinity.PodAffinity == nil {
		return nil
	}
	return pod.Spec.Affinity.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution
}

// satisfied says whether a pod runs with one that a term is about. The first of those that want each other may run anywhere.
func (n Neighbours) satisfied(term corev1.PodAffinityTerm, pod *corev1.Pod, together []corev1.Pod, others []*corev1.Pod, node *corev1.Node) bool {
	first := isAbout(&term, pod, pod)
	for _, other := range others {
		if isAbout(&term, pod, other) {
			if n.isNear(other, node, term.TopologyKey) {
				return true
			}
			first = false
		}
	}
	return first || slices.ContainsFunc(together, func(with corev1.Pod) bool { return with.Name != pod.Name && isAbout(&term, pod, &with) })
}

// isNear says whether a pod runs where a node is, by a label of nodes.
func (n Neighbours) isNear(pod *corev1.Pod, node *corev1.Node, key string) bool {
	value, ok := node.Labels[key]
	at := slices.IndexFunc(n.Nodes, func(of corev1.Node) bool { return of.Name == pod.Spec.NodeName })
	return ok && at >= 0 && n.Nodes[at].Labels[key] == value
}

// isAbout says whether a term of a pod is about another. The labels of namespaces are not known: a selector of some is about none.
func isAbout(term *corev1.PodAffinityTerm, of, another *corev1.Pod) bool {
	namespaces := term.Namespaces
	if len(namespaces) == 0 && term.NamespaceSelector == nil {
		namespaces = []string{of.Namespace}
	}
	all := term.NamespaceSelector != nil && len(term.NamespaceSelector.MatchLabels)+len(term.NamespaceSelector.MatchExpressions) == 0
	selector, err := metav1.LabelSelectorAsSelector(term.LabelSelector)
	return err == nil && (all || slices.Contains(namespaces, another.Namespace)) && selector.Matches(labels.Set(another.Labels))
}
