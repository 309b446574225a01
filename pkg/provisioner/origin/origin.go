// Package origin reads from a PersistentVolume which provisioner from before CSI made it, where its directory is, and on
// which node. It knows the annotations that the upstream programs and ours write, and decides nothing.
package origin

import (
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// The provisioner names that StorageClasses refer to.
const (
	PerNodeName    = "kubevirt.io/hostpath-provisioner"
	SingleNodeName = "hostpath"
)

// Annotations of claims and PersistentVolumes.
const (
	// ProvisionOnNode names the node of a volume. On a claim it wins over the scheduler's choice.
	ProvisionOnNode = "kubevirt.io/provisionOnNode"
	// Identity is on PersistentVolumes the name of the provisioner on each node, and for the single-node one the name of the
	// node. So the upstream programs write it, and compare it before they delete anything. Ours once wrote the node in both.
	Identity = "hostPathProvisionerIdentity"
	// ProvisionedBy is on PersistentVolumes the name of the provisioner.
	ProvisionedBy = "pv.kubernetes.io/provisioned-by"
)

// Node is the name of the node that has the directory of a PersistentVolume, by its annotations. It is an error if they do not
// say it, or contradict each other: then the volume is of no known node.
func Node(pv *corev1.PersistentVolume) (string, error) {
	by, identity, node := pv.Annotations[ProvisionedBy], pv.Annotations[Identity], pv.Annotations[ProvisionOnNode]
	switch {
	case by != PerNodeName && by != SingleNodeName:
		return "", fmt.Errorf("annotation %s is %q, which is neither %s nor %s", ProvisionedBy, by, PerNodeName, SingleNodeName)
	case identity == "":
		return "", fmt.Errorf("annotation %s is missing", Identity)
	case by == SingleNodeName:
		return identity, nil
	case node == "":
		return "", fmt.Errorf("annotation %s is missing: set it to the name of the node that has the directory", ProvisionOnNode)
	case identity != PerNodeName && identity != node:
		return "", fmt.Errorf("annotation %s is %q, and annotation %s names node %s", Identity, identity, ProvisionOnNode, node)
	}
	return node, nil
}

// Path is the directory of a PersistentVolume, as it is written there; empty if it has none.
func Path(pv *corev1.PersistentVolume) string {
	switch {
	case pv.Spec.HostPath != nil:
		return pv.Spec.HostPath.Path
	case pv.Spec.Local != nil:
		return pv.Spec.Local.Path
	}
	return ""
}

// Inside reports whether a path is a directory or something in it, however it is written.
func Inside(at, directory string) bool {
	at, directory = path.Clean(at), path.Clean(directory)
	return at == directory || strings.HasPrefix(at, strings.TrimSuffix(directory, "/")+"/")
}

// Hosts are the values of the label kubernetes.io/hostname that the node affinity of a PersistentVolume names; none if it names
// nodes in another way, too or instead.
func Hosts(pv *corev1.PersistentVolume) (hosts []string) {
	for _, term := range terms(pv) {
		if len(term.MatchExpressions) != 1 || len(term.MatchFields) > 0 {
			return nil
		}
		r := term.MatchExpressions[0]
		if r.Key != corev1.LabelHostname || r.Operator != corev1.NodeSelectorOpIn {
			return nil
		}
		hosts = append(hosts, r.Values...)
	}
	return hosts
}

// Only reports whether the node affinity of a PersistentVolume is for a node and no other. The upstream provisioner writes the
// node's name as the label's value, also where the label is another.
func Only(pv *corev1.PersistentVolume, node *corev1.Node) bool {
	hosts := Hosts(pv)
	return len(hosts) > 0 && !slices.ContainsFunc(hosts, func(host string) bool { return !isHost(node, host) })
}

// MayUse reports whether pods of a node may use a PersistentVolume, by its node affinity. It takes what it cannot evaluate for
// a match.
func MayUse(pv *corev1.PersistentVolume, node *corev1.Node) bool {
	all := terms(pv)
	return len(all) == 0 || slices.ContainsFunc(all, func(term corev1.NodeSelectorTerm) bool {
		return !slices.ContainsFunc(term.MatchExpressions, func(r corev1.NodeSelectorRequirement) bool {
			return r.Operator == corev1.NodeSelectorOpIn && !slices.ContainsFunc(r.Values, func(value string) bool {
				return value == node.Labels[r.Key] || r.Key == corev1.LabelHostname && isHost(node, value)
			})
		})
	})
}

func isHost(node *corev1.Node, host string) bool {
	return host == node.Labels[corev1.LabelHostname] || host == node.Name
}

func terms(pv *corev1.PersistentVolume) []corev1.NodeSelectorTerm {
	if pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil {
		return nil
	}
	return pv.Spec.NodeAffinity.Required.NodeSelectorTerms
}
