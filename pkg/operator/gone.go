package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
)

// GoneAfter is how long a node has to be gone before it is reported, unless the reconciler has another time: one that is
// made anew by the same name has its volumes again.
const GoneAfter = 10 * time.Minute

// goneNodes remembers since when nodes are gone that volumes name. A node that comes back in that time, however shortly, was not gone.
type goneNodes struct {
	checked time.Time
	mu      sync.Mutex
	since   map[string]time.Time
	found   []hppv1.DeletedNode
	// changed are the nodes that came or went since the last check began.
	changed sets.Set[string]
}

// forget is for a node that has just come or gone.
func (g *goneNodes) forget(node string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.changed == nil {
		g.changed = sets.New[string]()
	}
	g.changed.Insert(node)
	delete(g.since, node)
	g.found = slices.DeleteFunc(slices.Clone(g.found), func(of hppv1.DeletedNode) bool { return of.Node == node })
}

func (g *goneNodes) begin() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.changed = nil
}

// offer is what a check has found, but for nodes that have changed meanwhile.
func (g *goneNodes) offer(found []hppv1.DeletedNode) []hppv1.DeletedNode {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.found = slices.DeleteFunc(found, func(of hppv1.DeletedNode) bool { return g.changed.Has(of.Node) })
	return g.found
}

func (g *goneNodes) offered() []hppv1.DeletedNode {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.found
}

// A goneNode is one that is gone, with the volumes and snapshots that name it.
type goneNode struct {
	name      string
	volumes   []corev1.PersistentVolume
	snapshots []unstructured.Unstructured
	// bound are the names of those snapshots whose VolumeSnapshot is there.
	bound sets.Set[string]
}

// nodeChanged is called for each node that comes or goes.
func (r *Reconciler) nodeChanged(ctx context.Context, node client.Object) []reconcile.Request {
	r.gone.forget(node.GetName())
	return r.everyObject(ctx, node)
}

// deletedNodes are the nodes that are gone but for volumes and snapshots that name them. It checks at most once in the time of a resync.
func (r *Reconciler) deletedNodes(ctx context.Context) ([]hppv1.DeletedNode, error) {
	g, c, now := &r.gone, r.cluster(), r.now()
	if now.Sub(g.checked) < r.resync() {
		return g.offered(), nil
	}
	g.begin()
	left, err := c.leftOnGone(ctx, r.Optional.Has(place.SnapshotContent))
	if err != nil {
		return g.offered(), err
	}
	gone, err := c.checkGone(ctx, g.note(left, r.goneAfter(), now))
	if err != nil {
		return g.offered(), err
	}
	var found []hppv1.DeletedNode
	for _, node := range gone {
		if len(node.volumes)+len(node.snapshots) > 0 {
			found = append(found, node.report())
		}
	}
	g.checked = now
	return g.offer(found), nil
}

func (r *Reconciler) goneAfter() time.Duration { return cmp.Or(r.GoneAfter, GoneAfter) }

// leftOnGone are the nodes that are not in the cache, with what names them.
func (c *cluster) leftOnGone(ctx context.Context, withSnapshots bool) (map[string]*goneNode, error) {
	volumes, err := c.volumes(ctx)
	if err != nil {
		return nil, err
	}
	var snapshots []unstructured.Unstructured
	if withSnapshots {
		if snapshots, err = c.snapshots(ctx); err != nil {
			return nil, err
		}
	}
	nodes := &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	if err := c.List(ctx, nodes); err != nil {
		return nil, err
	}
	there := sets.New[string]()
	for _, node := range nodes.Items {
		there.Insert(node.Name)
	}
	return leftOn(there, volumes, snapshots)
}

// note returns those of the nodes that have been gone for long enough, by name.
func (g *goneNodes) note(left map[string]*goneNode, enough time.Duration, now time.Time) []*goneNode {
	g.mu.Lock()
	defer g.mu.Unlock()
	since := map[string]time.Time{}
	var found []*goneNode
	for _, node := range slices.Sorted(maps.Keys(left)) {
		since[node] = now
		if before, known := g.since[node]; known {
			since[node] = before
		}
		if now.Sub(since[node]) >= enough {
			found = append(found, left[node])
		}
	}
	g.since = since
	return found
}

// leftOn are the nodes, by name, that are not there, with the volumes and snapshots that name them, each in the order of their names.
func leftOn(there sets.Set[string], volumes []corev1.PersistentVolume, snapshots []unstructured.Unstructured) (map[string]*goneNode, error) {
	left := map[string]*goneNode{}
	gone := func(node string) *goneNode {
		if node == "" || there.Has(node) {
			return nil
		}
		if left[node] == nil {
			left[node] = &goneNode{name: node}
		}
		return left[node]
	}
	for _, volume := range volumes {
		if node := gone(place.NodeOfVolume(&volume)); node != nil {
			node.volumes = append(node.volumes, volume)
		}
	}
	for _, snapshot := range snapshots {
		name, err := place.OnlyNodeOfSnapshot(&snapshot)
		if err != nil {
			return nil, fmt.Errorf("find the node of the VolumeSnapshotContent %s: %w", snapshot.GetName(), err)
		}
		if node := gone(name); node != nil {
			node.snapshots = append(node.snapshots, snapshot)
		}
	}
	for _, of := range left {
		slices.SortFunc(of.volumes, func(a, b corev1.PersistentVolume) int { return strings.Compare(a.Name, b.Name) })
		slices.SortFunc(of.snapshots, func(a, b unstructured.Unstructured) int { return strings.Compare(a.GetName(), b.GetName()) })
	}
	return left, nil
}

// checkGone looks a second time at what is to be offered for removal, without the cache: it drops nodes that are there, and
// volumes that a pod uses on a node that is there, or that move: another node may have all of such a one, or its last copy.
func (c *cluster) checkGone(ctx context.Context, found []*goneNode) ([]*goneNode, error) {
	if len(found) == 0 {
		return nil, nil
	}
	runs := map[string]bool{} // by node, whether it is there
	isThere := func(node string) (there bool, err error) {
		there, known := runs[node]
		if !known {
			var now nodeState
			now, err = c.state(ctx, node)
			there = now.there
			runs[node] = there
		}
		return there, err
	}
	used := sets.New[types.NamespacedName]()
	var problems []error
	// In two statements: the order in which append is given problems and what adds to them is not defined.
	err := c.eachPod(ctx, func(pod *corev1.Pod) {
		if pod.Spec.NodeName == "" { // it waits, maybe for such a volume
			return
		}
		there, err := isThere(pod.Spec.NodeName)
		if problems = append(problems, err); there {
			used.Insert(claimsOf(pod)...)
		}
	})
	moving, movesErr := c.moving(ctx)
	problems = append(problems, err, movesErr)
	var offered []*goneNode
	for _, node := range found {
		there, err := isThere(node.name)
		problems = append(problems, err)
		node.volumes = slices.DeleteFunc(node.volumes, func(volume corev1.PersistentVolume) bool {
			claim := volume.Spec.ClaimRef
			return moving.Has(volume.Name) || claim != nil && used.Has(types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name})
		})
		if !there {
			node.bound, err = c.bound(ctx, node.snapshots)
			problems = append(problems, err)
			offered = append(offered, node)
		}
	}
	return offered, errors.Join(problems...)
}

// bound are the names of the snapshots that a command removes and whose VolumeSnapshot is there. What has its name by now may be another
// one, with a snapshot on another node.
func (c *cluster) bound(ctx context.Context, snapshots []unstructured.Unstructured) (sets.Set[string], error) {
	names := sets.New[string]()
	for _, content := range snapshots[:min(mostCleaned, len(snapshots))] {
		of, _, _ := unstructured.NestedStringMap(content.Object, "spec", "volumeSnapshotRef")
		if of["name"] == "" || of["uid"] == "" {
			continue // there was none yet
		}
		snapshot := empty(place.Snapshot)
		err := c.api.Get(ctx, client.ObjectKey{Namespace: of["namespace"], Name: of["name"]}, snapshot)
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("read the VolumeSnapshot of %s: %w", content.GetName(), err)
		}
		if of["uid"] == string(snapshot.GetUID()) {
			names.Insert(content.GetName())
		}
	}
	return names, nil
}

func (n *goneNode) report() hppv1.DeletedNode {
	claims := 0
	for _, volume := range n.volumes {
		if claimOf(&volume) != nil {
			claims++
		}
	}
	return hppv1.DeletedNode{
		Node: n.name, PersistentVolumes: len(n.volumes), Claims: claims, VolumeSnapshotContents: len(n.snapshots),
		Command: strings.Join(append(cleanUpOfSnapshots(n.snapshots, n.bound), cleanUpOfVolumes(n.volumes)...), " && "),
	}
}

// claimOf is the claim that a volume is bound to. One that was bound to it once may be another by now.
func claimOf(volume *corev1.PersistentVolume) *corev1.ObjectReference {
	if volume.Status.Phase != corev1.VolumeBound {
		return nil
	}
	return volume.Spec.ClaimRef
}

// mostCleaned is how many volumes, and how many snapshots, one command removes.
const mostCleaned = 20

// cleanUpOfVolumes are the commands that remove volumes whose node is gone, and their claims.
func cleanUpOfVolumes(volumes []corev1.PersistentVolume) []string {
	claims := map[string][]string{}
	var names []string
	for _, volume := range volumes[:min(mostCleaned, len(volumes))] {
		names = append(names, volume.Name)
		if claim := claimOf(&volume); claim != nil {
			claims[claim.Namespace] = append(claims[claim.Namespace], claim.Name)
		}
	}
	return cleanUp("pvc", claims, "pv", names)
}

// cleanUpOfSnapshots are the commands that remove snapshots whose node is gone, and the VolumeSnapshots of those that are bound.
func cleanUpOfSnapshots(contents []unstructured.Unstructured, bound sets.Set[string]) []string {
	snapshots := map[string][]string{}
	var names []string
	for _, content := range contents[:min(mostCleaned, len(contents))] {
		names = append(names, content.GetName())
		of, _, _ := unstructured.NestedStringMap(content.Object, "spec", "volumeSnapshotRef")
		if bound.Has(content.GetName()) {
			snapshots[of["namespace"]] = append(snapshots[of["namespace"]], of["name"])
		}
	}
	return cleanUp("volumesnapshot", snapshots, "volumesnapshotcontent", names)
}

// cleanUp are the commands that remove objects, whose finalizers no controller is left to remove, and what is bound to them, by namespace.
// A command that is given once more ends at the objects, which are gone: what has the names of those bound to them by then may be others.
func cleanUp(boundKind string, bound map[string][]string, kind string, names []string) []string {
	if len(names) == 0 {
		return nil
	}
	all := strings.Join(names, " ")
	steps := []string{fmt.Sprintf("kubectl delete %s --wait=false %s", kind, all)}
	finalizers := fmt.Sprintf(`kubectl patch %s %s --type=merge -p '{"metadata":{"finalizers":null}}'`, kind, all)
	var deletions []string
	for _, namespace := range slices.Sorted(maps.Keys(bound)) {
		deletions = append(deletions, fmt.Sprintf("kubectl delete %s --ignore-not-found --wait=false -n %s %s", boundKind, namespace, strings.Join(bound[namespace], " ")))
	}
	// The snapshot controller makes another VolumeSnapshotContent for a VolumeSnapshot that is not being deleted and has none.
	// A PersistentVolume may go as soon as its claim does.
	if kind == "volumesnapshotcontent" {
		return append(append(steps, deletions...), finalizers)
	}
	return append(append(steps, finalizers), deletions...)
}
