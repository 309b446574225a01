package operator

import (
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
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
)

const (
	// topologyKey is the label by which a volume names its node.
	topologyKey = "topology.hostpath.csi/node"
	// legacyNode is the annotation by which a volume of the pre-CSI provisioner names its node.
	legacyNode = "hostPathProvisionerIdentity"
	// GoneAfter is how long a node has to be gone before it is reported, if the reconciler says nothing else: one that is
	// made anew by the same name has its volumes again.
	GoneAfter = 10 * time.Minute
)

// orphanFinalizers are those of a volume that nobody is left to remove when its node is gone: that of the provisioner on
// the node, and that for volumes whose claim is there.
var orphanFinalizers = []string{"external-provisioner.volume.kubernetes.io/finalizer", "kubernetes.io/pv-protection"}

// goneNodes remembers since when nodes are gone that volumes name.
type goneNodes struct {
	mu      sync.Mutex
	checked time.Time
	since   map[string]time.Time
	found   []hppv1.DeletedNode
}

// A goneNode is one that has been gone for long enough, with the volumes that name it.
type goneNode struct {
	name    string
	volumes []corev1.PersistentVolume
}

// deletedNodes are the nodes that are gone but for volumes that name them. It checks at most once in the time of a resync,
// and removes the volumes then if the object says so.
func (r *Reconciler) deletedNodes(ctx context.Context, object *hppv1.HostPathProvisioner) ([]hppv1.DeletedNode, error) {
	g := &r.gone
	g.mu.Lock()
	defer g.mu.Unlock()
	now := r.now()
	if now.Sub(g.checked) < r.resync() {
		return g.found, nil
	}
	volumes, err := r.volumes(ctx)
	if err != nil {
		return g.found, err
	}
	nodes := &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	if err := r.Client.List(ctx, nodes); err != nil {
		return g.found, err
	}
	there := sets.New[string]()
	for _, node := range nodes.Items {
		there.Insert(node.Name)
	}
	var problems []error
	g.found = nil
	for _, node := range g.note(volumesOfGone(volumes, there), r.goneAfter(), now) {
		if object.Spec.DeletedNodes == hppv1.RemoveVolumes {
			problems = append(problems, r.removeVolumes(ctx, object, &node))
		}
		if len(node.volumes) > 0 {
			g.found = append(g.found, node.report())
		}
	}
	if err := errors.Join(problems...); err != nil {
		return g.found, err
	}
	g.checked = now
	return g.found, nil
}

func (r *Reconciler) goneAfter() time.Duration {
	if r.GoneAfter > 0 {
		return r.GoneAfter
	}
	return GoneAfter
}

// note returns the nodes that have been gone for long enough, by name.
func (g *goneNodes) note(left map[string][]corev1.PersistentVolume, enough time.Duration, now time.Time) []goneNode {
	since := map[string]time.Time{}
	var found []goneNode
	for _, node := range slices.Sorted(maps.Keys(left)) {
		since[node] = now
		if before, known := g.since[node]; known {
			since[node] = before
		}
		if now.Sub(since[node]) >= enough {
			found = append(found, goneNode{name: node, volumes: left[node]})
		}
	}
	g.since = since
	return found
}

// volumesOfGone are the volumes by their node, of nodes that are not there, each in the order of their names.
func volumesOfGone(volumes []corev1.PersistentVolume, there sets.Set[string]) map[string][]corev1.PersistentVolume {
	left := map[string][]corev1.PersistentVolume{}
	for _, volume := range volumes {
		if node := nodeOfVolume(&volume); node != "" && !there.Has(node) {
			left[node] = append(left[node], volume)
		}
	}
	for _, of := range left {
		slices.SortFunc(of, func(a, b corev1.PersistentVolume) int { return strings.Compare(a.Name, b.Name) })
	}
	return left
}

// nodeOfVolume is the one node of a volume, or empty.
func nodeOfVolume(volume *corev1.PersistentVolume) string {
	if ofLegacyProvisioner(volume) {
		return volume.Annotations[legacyNode]
	}
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

// removeVolumes removes those volumes of a node that were made for a claim and would go with it, and leaves the others.
func (r *Reconciler) removeVolumes(ctx context.Context, object *hppv1.HostPathProvisioner, node *goneNode) error {
	// The cache may be behind: a node that is back by now keeps its volumes.
	there, _, err := r.answers(ctx, node.name)
	if err != nil || there {
		return err
	}
	var removed []string
	var problems []error
	node.volumes = slices.DeleteFunc(node.volumes, func(volume corev1.PersistentVolume) bool {
		if volume.Spec.ClaimRef == nil || volume.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
			return false
		}
		if err := r.removeVolume(ctx, &volume); err != nil {
			problems = append(problems, fmt.Errorf("remove the PersistentVolume %s of the deleted node %s: %w", volume.Name, node.name, err))
			return false
		}
		removed = append(removed, volume.Name)
		return true
	})
	if len(removed) > 0 {
		const most = 10 // a note has 1024 bytes
		r.Recorder.Eventf(object, nil, corev1.EventTypeNormal, "VolumesRemoved", "Reconcile", "Removed %d PersistentVolumes of the deleted node %s: %s",
			len(removed), node.name, strings.Join(removed[:min(most, len(removed))], ", "))
	}
	return errors.Join(problems...)
}

// removeVolume removes one volume, if it is as it was when it was judged. Other finalizers than those of orphanFinalizers
// keep it, deleted, until who set them is done.
func (r *Reconciler) removeVolume(ctx context.Context, volume *corev1.PersistentVolume) error {
	if volume.DeletionTimestamp == nil {
		same := client.Preconditions{UID: &volume.UID, ResourceVersion: &volume.ResourceVersion}
		if err := r.Client.Delete(ctx, volume.DeepCopy(), same); err != nil {
			return client.IgnoreNotFound(err)
		}
	}
	now := &corev1.PersistentVolume{}
	if err := r.APIReader.Get(ctx, client.ObjectKeyFromObject(volume), now); err != nil || now.UID != volume.UID {
		return client.IgnoreNotFound(err)
	}
	without := now.DeepCopy()
	without.Finalizers = slices.DeleteFunc(without.Finalizers, func(f string) bool { return slices.Contains(orphanFinalizers, f) })
	return client.IgnoreNotFound(r.Client.Patch(ctx, without, client.MergeFromWithOptions(now, client.MergeFromWithOptimisticLock{})))
}

// report is what the status says of a node.
func (n goneNode) report() hppv1.DeletedNode {
	claims := 0
	for _, volume := range n.volumes {
		if claimOf(&volume) != nil {
			claims++
		}
	}
	return hppv1.DeletedNode{Node: n.name, PersistentVolumes: len(n.volumes), Claims: claims, Command: cleanUp(n.volumes)}
}

// claimOf is the claim that a volume is bound to. One that was bound to it once may be another by now.
func claimOf(volume *corev1.PersistentVolume) *corev1.ObjectReference {
	if volume.Status.Phase != corev1.VolumeBound {
		return nil
	}
	return volume.Spec.ClaimRef
}

// cleanUp is the command that removes volumes whose node is gone, and their claims. Nobody is left who would remove their
// finalizers.
func cleanUp(volumes []corev1.PersistentVolume) string {
	const most = 20
	claims := map[string][]string{}
	var names, steps []string
	for _, volume := range volumes[:min(most, len(volumes))] {
		names = append(names, volume.Name)
		if claim := claimOf(&volume); claim != nil {
			claims[claim.Namespace] = append(claims[claim.Namespace], claim.Name)
		}
	}
	for _, namespace := range slices.Sorted(maps.Keys(claims)) {
		steps = append(steps, fmt.Sprintf("kubectl delete pvc --ignore-not-found --wait=false -n %s %s", namespace, strings.Join(claims[namespace], " ")))
	}
	all := strings.Join(names, " ")
	return strings.Join(append(steps, "kubectl delete pv --wait=false "+all,
		fmt.Sprintf(`kubectl patch pv %s --type=merge -p '{"metadata":{"finalizers":null}}'`, all)), " && ")
}
