package kubectl

// reportVersion is that of the document which this package reads (docs/inspect.md).
const reportVersion = 1

// A Report is what is read of the document that inspect prints. Sizes are bytes; what is not known is nil.
type Report struct {
	Version int `json:"version"`
	// Abnormal is how much is not in order.
	Abnormal int    `json:"abnormal"`
	Pools    []Pool `json:"pools"`
	// NoDevices is why no block volume can be made; empty if one can.
	NoDevices string `json:"noDevices"`
}

// A Pool is one of the node's pools.
type Pool struct {
	Name           string     `json:"name"`
	Path           string     `json:"path"`
	UUID           string     `json:"uuid"`
	Shared         bool       `json:"shared"`
	Abnormal       bool       `json:"abnormal"`
	Condition      string     `json:"condition"`
	Quota          string     `json:"quota"`
	Unenforced     string     `json:"unenforced"`
	SizeBytes      *int64     `json:"sizeBytes"`
	FreeBytes      *int64     `json:"freeBytes"`
	PromisedBytes  *int64     `json:"promisedBytes"`
	AvailableBytes *int64     `json:"availableBytes"`
	Volumes        []Volume   `json:"volumes"`
	Snapshots      []Snapshot `json:"snapshots"`
}

// A Volume is one of a pool's volumes.
type Volume struct {
	ID            string   `json:"id"`
	Mode          string   `json:"mode"`
	Abnormal      bool     `json:"abnormal"`
	Condition     string   `json:"condition"`
	PromisedBytes *int64   `json:"promisedBytes"`
	UsedBytes     *int64   `json:"usedBytes"`
	Nodes         []string `json:"nodes"`
}

// A Snapshot is one of a pool's snapshots.
type Snapshot struct {
	Source string `json:"source"`
}
