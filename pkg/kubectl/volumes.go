package kubectl

import (
	"cmp"
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// driverName is the driver of PersistentVolumes (docs/migration.md).
const driverName = "kubevirt.io.hostpath-provisioner"

// VolumeHeadings are those of the table of volumes.
var VolumeHeadings = []string{"NAMESPACE", "CLAIM", "NODE", "POOL", "SIZE", "USED", "SNAPSHOTS", "CONDITION"}

// A VolumeRow is a volume of a pool, or a PersistentVolume that no node has. Sizes are bytes.
type VolumeRow struct {
	Namespace string `json:"namespace,omitempty"`
	Claim     string `json:"claim,omitempty"`
	// Volume is the name of the PersistentVolume, and ID that of the driver; they are mostly the same.
	Volume        string `json:"volume,omitempty"`
	ID            string `json:"id"`
	Node          string `json:"node,omitempty"`
	Pool          string `json:"pool,omitempty"`
	Mode          string `json:"mode,omitempty"`
	PromisedBytes *int64 `json:"promisedBytes"`
	UsedBytes     *int64 `json:"usedBytes"`
	Snapshots     int    `json:"snapshots"`
	// PublishedOn are the nodes on which pods use it.
	PublishedOn []string `json:"publishedOn"`
	Abnormal    bool     `json:"abnormal"`
	Condition   string   `json:"condition"`
}

func (r VolumeRow) cells() []string {
	claim := r.Claim
	if claim == "" {
		claim = "(" + r.ID + ")"
	}
	return []string{
		r.Namespace, claim, r.Node, r.Pool, size(r.PromisedBytes), size(r.UsedBytes), count(r.Snapshots), condition(r.Abnormal, r.Condition),
	}
}

func (r *VolumeRow) name(v corev1.PersistentVolume) {
	r.Volume = v.Name
	if v.Spec.ClaimRef != nil {
		r.Namespace, r.Claim = v.Spec.ClaimRef.Namespace, v.Spec.ClaimRef.Name
	}
}

// Volumes are those of all nodes, with their claims, by namespace and claim. One of a shared pool is there once, with the first of
// the nodes that use it.
func Volumes(ctx context.Context, k Kubectl, nodes []Node) ([]VolumeRow, error) {
	var all []corev1.PersistentVolume
	if err := get(ctx, k, &all, "persistentvolumes"); err != nil {
		return nil, err
	}
	volumes := make(map[string]corev1.PersistentVolume)
	for _, v := range all {
		if v.Spec.CSI != nil && v.Spec.CSI.Driver == driverName {
			volumes[v.Spec.CSI.VolumeHandle] = v
		}
	}
	rows, silent := onNodes(nodes)
	for i := range rows {
		if v, ok := volumes[rows[i].ID]; ok {
			rows[i].name(v)
			delete(volumes, rows[i].ID)
		}
	}
	for id, v := range volumes {
		row := VolumeRow{ID: id, Abnormal: true, Condition: "no node has it"}
		if silent {
			row.Abnormal, row.Condition = false, "unknown: no node that gave a report has it"
		}
		row.name(v)
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b VolumeRow) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Claim, b.Claim), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Node, b.Node))
	})
	return rows, nil
}

// onNodes are the volumes that nodes have, and whether a node gave no report.
func onNodes(nodes []Node) (rows []VolumeRow, silent bool) {
	type place struct{ pool, id string }
	known := make(map[place]bool)
	for _, n := range nodes {
		silent = silent || n.Err != nil
		for _, p := range n.Report.Pools {
			snapshots := make(map[string]int)
			for _, s := range p.Snapshots {
				snapshots[s.Source]++
			}
			for _, v := range p.Volumes {
				at := place{p.UUID, v.ID}
				if p.Shared && known[at] {
					continue
				}
				known[at] = true
				row := VolumeRow{
					ID: v.ID, Node: n.Driver.Node, Pool: p.Name, Mode: v.Mode, PromisedBytes: v.PromisedBytes, UsedBytes: v.UsedBytes,
					Snapshots: snapshots[v.ID], PublishedOn: v.Nodes, Abnormal: v.Abnormal, Condition: v.Condition,
				}
				if p.Shared && len(v.Nodes) > 0 {
					row.Node = v.Nodes[0]
				}
				rows = append(rows, row)
			}
		}
	}
	return rows, silent
}
