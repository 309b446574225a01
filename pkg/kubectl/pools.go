package kubectl

// PoolHeadings are those of the table of pools.
var PoolHeadings = []string{"NODE", "POOL", "SIZE", "PROMISED", "USED", "FREE", "AVAILABLE", "CONDITION"}

// A PoolRow is a pool on a node, or a node that gave no report. Sizes are bytes.
type PoolRow struct {
	Node string `json:"node"`
	Pool string `json:"pool,omitempty"`
	Path string `json:"path,omitempty"`
	// Size, used and free are of the filesystem. Available is what can still be promised.
	SizeBytes      *int64 `json:"sizeBytes"`
	PromisedBytes  *int64 `json:"promisedBytes"`
	UsedBytes      *int64 `json:"usedBytes"`
	FreeBytes      *int64 `json:"freeBytes"`
	AvailableBytes *int64 `json:"availableBytes"`
	// Enforced is what keeps the sizes of volumes: xfs, ext4 or btrfs; empty for nothing.
	Enforced  string `json:"enforcedBy,omitempty"`
	Abnormal  bool   `json:"abnormal"`
	Condition string `json:"condition"`
}

func (r PoolRow) cells() []string {
	return []string{
		r.Node, r.Pool, size(r.SizeBytes), size(r.PromisedBytes), size(r.UsedBytes), size(r.FreeBytes), size(r.AvailableBytes),
		condition(r.Abnormal, r.Condition),
	}
}

// Pools are those of all nodes, by node and in the order of the driver's configuration.
func Pools(nodes []Node) (rows []PoolRow) {
	for _, n := range nodes {
		if n.Err != nil {
			rows = append(rows, PoolRow{Node: n.Driver.Node, Abnormal: true, Condition: n.Err.Error()})
			continue
		}
		for _, p := range n.Report.Pools {
			row := PoolRow{
				Node: n.Driver.Node, Pool: p.Name, Path: p.Path, SizeBytes: p.SizeBytes, PromisedBytes: p.PromisedBytes, FreeBytes: p.FreeBytes,
				AvailableBytes: p.AvailableBytes, Enforced: p.Quota, Abnormal: p.Abnormal, Condition: p.Condition,
			}
			if p.SizeBytes != nil && p.FreeBytes != nil {
				used := *p.SizeBytes - *p.FreeBytes
				row.UsedBytes = &used
			}
			rows = append(rows, row)
		}
	}
	return rows
}
