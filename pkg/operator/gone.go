package operator

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/sets"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
)

// leftBehind counts what names each node, and remembers it for the time of a resync: it reads all PersistentVolumes.
type leftBehind struct {
	counted time.Time
	byNode  map[string]hppv1.DeletedNode
}

// deletedNodes are the nodes that volumes or snapshots name and that the cluster does not have now, in the order of their names.
func (r *Reconciler) deletedNodes(ctx context.Context) ([]hppv1.DeletedNode, error) {
	c, now := r.cluster(), r.now()
	there, err := c.nodeNames(ctx)
	if err != nil {
		return nil, err
	}
	if now.Sub(r.left.counted) >= r.resync() {
		byNode, err := c.countByNode(ctx, r.Optional.Has(place.SnapshotContent))
		if err != nil {
			return nil, err
		}
		r.left = leftBehind{now, byNode}
	}
	var found []hppv1.DeletedNode
	for _, node := range slices.Sorted(maps.Keys(r.left.byNode)) {
		if !there.Has(node) {
			found = append(found, r.left.byNode[node])
		}
	}
	return found, nil
}

// nodeNames are the nodes that the cache has.
func (c *cluster) nodeNames(ctx context.Context) (sets.Set[string], error) {
	nodes := &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NodeList"))
	if err := c.List(ctx, nodes); err != nil {
		return nil, err
	}
	names := sets.New[string]()
	for _, node := range nodes.Items {
		names.Insert(node.Name)
	}
	return names, nil
}

func (c *cluster) countByNode(ctx context.Context, withSnapshots bool) (map[string]hppv1.DeletedNode, error) {
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
	return countByNode(volumes, snapshots)
}

// countByNode counts, for each node, the volumes and snapshots that name it.
func countByNode(volumes []corev1.PersistentVolume, snapshots []unstructured.Unstructured) (map[string]hppv1.DeletedNode, error) {
	counts := map[string]hppv1.DeletedNode{}
	count := func(node string, add func(*hppv1.DeletedNode)) {
		if node != "" {
			of := counts[node]
			of.Node = node
			add(&of)
			counts[node] = of
		}
	}
	for _, volume := range volumes {
		count(place.NodeOfVolume(&volume), func(of *hppv1.DeletedNode) {
			of.PersistentVolumes++
			if volume.Status.Phase == corev1.VolumeBound {
				of.Claims++
			}
		})
	}
	for _, snapshot := range snapshots {
		node, err := place.OnlyNodeOfSnapshot(&snapshot)
		if err != nil {
			return nil, fmt.Errorf("find the node of the VolumeSnapshotContent %s: %w", snapshot.GetName(), err)
		}
		count(node, func(of *hppv1.DeletedNode) { of.VolumeSnapshotContents++ })
	}
	return counts, nil
}
