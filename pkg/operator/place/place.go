// Package place knows on which node a volume or a snapshot lies, and whether it is of the driver or of the pre-CSI provisioner.
package place

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

const (
	// TopologyKey is the segment of the driver's volumes. Its value is the name of a node.
	TopologyKey = "topology.hostpath.csi/node"
	// SnapshotGroup is the API group of external-snapshotter.
	SnapshotGroup = "snapshot.storage.k8s.io"

	// managedBy is the label of the node whose csi-snapshotter takes care of a VolumeSnapshotContent. The snapshot-controller
	// sets it.
	managedBy = "snapshot.storage.kubernetes.io/managed-by"
)

// SnapshotContent is the kind of what holds a snapshot, as a PersistentVolume holds a volume.
var SnapshotContent = schema.GroupVersionKind{Group: SnapshotGroup, Version: "v1", Kind: "VolumeSnapshotContent"}

// Count says in words how many volumes there are.
func Count(volumes int) string {
	if volumes == 1 {
		return "1 PersistentVolume"
	}
	return fmt.Sprintf("%d PersistentVolumes", volumes)
}

// OfDriver says whether a volume is of the driver.
func OfDriver(volume *corev1.PersistentVolume) bool {
	return volume.Spec.CSI != nil && volume.Spec.CSI.Driver == render.DriverName
}

// OfLegacyProvisioner says whether a volume was made by the pre-CSI provisioner that pathConfig deploys.
func OfLegacyProvisioner(volume *corev1.PersistentVolume) bool {
	return volume.Spec.HostPath != nil && volume.Annotations[origin.ProvisionedBy] == origin.PerNodeName
}

// SnapshotOfDriver says whether a VolumeSnapshotContent is of the driver, or may be.
func SnapshotOfDriver(content *unstructured.Unstructured) bool {
	driver, _, err := unstructured.NestedString(content.Object, "spec", "driver")
	return driver == render.DriverName || err != nil
}

// NodeOfVolume is the only node of a volume, as all that is written about it says alike. It is empty if the volume is on several
// nodes, or if its node is not known for sure: such a volume is never taken for one of a deleted node.
func NodeOfVolume(volume *corev1.PersistentVolume) string {
	nodes := segments(volume)
	if OfLegacyProvisioner(volume) {
		annotated, err := origin.Node(volume)
		if err != nil {
			return ""
		}
		nodes = append(origin.Hosts(volume), annotated)
		if len(nodes) == 1 { // there is no affinity
			return ""
		}
	}
	if nodes = slices.Compact(nodes); len(nodes) != 1 {
		return ""
	}
	return nodes[0]
}

// segments are the nodes that the terms of a volume's affinity name, of a volume of the driver.
func segments(volume *corev1.PersistentVolume) (nodes []string) {
	if volume.Spec.NodeAffinity == nil || volume.Spec.NodeAffinity.Required == nil {
		return nil
	}
	for _, term := range volume.Spec.NodeAffinity.Required.NodeSelectorTerms {
		at := slices.IndexFunc(term.MatchExpressions, func(e corev1.NodeSelectorRequirement) bool {
			return e.Key == TopologyKey && e.Operator == corev1.NodeSelectorOpIn
		})
		if at < 0 {
			return nil
		}
		nodes = append(nodes, term.MatchExpressions[at].Values...)
	}
	return nodes
}

// NodeOfSnapshot is the node that has a snapshot of the driver: the one that the snapshot-controller has chosen to make it, or else
// the one in the handle that the driver gave it. It is empty for a snapshot of another driver.
func NodeOfSnapshot(content *unstructured.Unstructured) (string, error) {
	chosen, made, err := nodesOfSnapshot(content)
	return cmp.Or(chosen, made), err
}

// OnlyNodeOfSnapshot is NodeOfSnapshot where the label and the handle do not say two nodes. It is empty where they do: such a snapshot
// is never taken for one of a deleted node.
func OnlyNodeOfSnapshot(content *unstructured.Unstructured) (string, error) {
	chosen, made, err := nodesOfSnapshot(content)
	if chosen != "" && made != "" && chosen != made {
		return "", err
	}
	return cmp.Or(chosen, made), err
}

func nodesOfSnapshot(content *unstructured.Unstructured) (chosen, made string, err error) {
	if driver, _, err := unstructured.NestedString(content.Object, "spec", "driver"); driver != render.DriverName || err != nil {
		return "", "", err
	}
	handle, _, err := unstructured.NestedString(content.Object, "status", "snapshotHandle")
	if err != nil {
		return "", "", err
	}
	_, made, _ = strings.Cut(handle, "@")
	return content.GetLabels()[managedBy], made, nil
}

// EachVolume reads all PersistentVolumes of the cluster page by page: there may be many of other drivers.
func EachVolume(ctx context.Context, api client.Reader, do func(*corev1.PersistentVolume)) error {
	for next := ""; ; {
		list := &corev1.PersistentVolumeList{}
		if err := api.List(ctx, list, client.Limit(500), client.Continue(next)); err != nil {
			return err
		}
		for i := range list.Items {
			do(&list.Items[i])
		}
		if next = list.Continue; next == "" {
			return nil
		}
	}
}
