package operator

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
)

const (
	// topologyKey is the label by which a volume names its node.
	topologyKey = "topology.hostpath.csi/node"
	// goneAfter is how long a node has to be gone before it is reported: one that is made anew by the same name has its
	// volumes again.
	goneAfter = 10 * time.Minute
)

// goneNodes remembers since when nodes are gone that volumes name.
type goneNodes struct {
	mu      sync.Mutex
	checked time.Time
	since   map[string]time.Time
	found   []hppv1.DeletedNode
}

// deletedNodes are the nodes that are gone but for volumes that name them. It checks at most once in the time of a resync.
func (r *Reconciler) deletedNodes(ctx context.Context) ([]hppv1.DeletedNode, error) {
	g := &r.gone
	g.mu.Lock()
	defer g.mu.Unlock()
	now := r.now()
	if now.Sub(g.checked) < resync {
		return g.found, nil
	}
	volumes, err := r.volumes(ctx)
	if err != nil {
		return nil, err
	}
	nodes := &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	if err := r.Client.List(ctx, nodes); err != nil {
		return nil, err
	}
	there := sets.New[string]()
	for _, node := range nodes.Items {
		there.Insert(node.Name)
	}
	g.checked, g.found = now, g.report(volumesOfGone(volumes, there), now)
	return g.found, nil
}

// report returns the nodes that have been gone for long enough.
func (g *goneNodes) report(left map[string][]string, now time.Time) []hppv1.DeletedNode {
	since := map[string]time.Time{}
	var found []hppv1.DeletedNode
	for _, node := range slices.Sorted(maps.Keys(left)) {
		since[node] = now
		if before, known := g.since[node]; known {
			since[node] = before
		}
		if now.Sub(since[node]) >= goneAfter {
			found = append(found, hppv1.DeletedNode{Node: node, PersistentVolumes: len(left[node]), Command: cleanUp(left[node])})
		}
	}
	g.since = since
	return found
}

// volumesOfGone are the names of the volumes by their node, of nodes that are not there.
func volumesOfGone(volumes []corev1.PersistentVolume, there sets.Set[string]) map[string][]string {
	left := map[string][]string{}
	for _, volume := range volumes {
		if node := nodeOfVolume(&volume); node != "" && !there.Has(node) {
			left[node] = append(left[node], volume.Name)
		}
	}
	return left
}

// nodeOfVolume is the one node of a volume, or empty.
func nodeOfVolume(volume *corev1.PersistentVolume) string {
	if volume.Spec.NodeAffinity == nil || volume.Spec.NodeAffinity.Required == nil {
		return ""
	}
	for _, term := range volume.Spec.NodeAffinity.Required.NodeSelectorTerms {
		for _, e := range term.MatchExpressions {
			if e.Key == topologyKey && e.Operator == corev1.NodeSelectorOpIn && len(e.Values) == 1 {
				return e.Values[0]
			}
		}
	}
	return ""
}

// cleanUp is the command that removes volumes whose node is gone. Nobody is left who would remove their finalizer.
func cleanUp(volumes []string) string {
	const most = 20
	slices.Sort(volumes)
	if len(volumes) > most {
		volumes = volumes[:most]
	}
	names := strings.Join(volumes, " ")
	return fmt.Sprintf(`kubectl delete pv --wait=false %s && kubectl patch pv %s --type=merge -p '{"metadata":{"finalizers":null}}'`, names, names)
}
