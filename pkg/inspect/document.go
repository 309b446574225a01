package inspect

import (
	"encoding/json"
	"io"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
)

// documentVersion is that of the JSON document. It grows when a field changes its
// meaning or goes away; a new field is no new version.
const documentVersion = 1

// A Report is what a check at a node gave: the JSON document of docs/inspect.md. Sizes
// are bytes; what is not known is null or absent.
type Report struct {
	Version int    `json:"version"`
	Node    string `json:"node,omitempty"`
	// Abnormal is how many pools, volumes, snapshots and leftovers are not in order.
	Abnormal int    `json:"abnormal"`
	Pools    []Pool `json:"pools"`
	// OutOfUse are pools that the driver has served, with volumes in them, and that are not configured any more.
	OutOfUse []OutOfUse `json:"outOfUse,omitempty"`
	// OutOfUseError is why it is not known which these are.
	OutOfUseError string `json:"outOfUseError,omitempty"`
	// NoDevices is why no block volume can be made, as without the kernel's module loop.
	NoDevices string `json:"noDevices,omitempty"`
}

// An OutOfUse is a pool that is not configured any more.
type OutOfUse struct {
	Name string `json:"name"`
	Path string `json:"path"`
	// Volumes are the ids of volumes and snapshots that were in it; Partial: there may be others.
	Volumes []string `json:"volumes"`
	Partial bool     `json:"partial"`
}

// A Pool is one of the node's pools.
type Pool struct {
	Name   string `json:"name"`
	Path   string `json:"path"`
	Shared bool   `json:"shared"`
	// Readable: its layout could be read. If not, what follows Condition is empty.
	Readable  bool   `json:"readable"`
	Abnormal  bool   `json:"abnormal"`
	Condition string `json:"condition"`
	// Reason is what is wrong, in one word of pkg/health.
	Reason string `json:"reason,omitempty"`

	UUID    string    `json:"uuid,omitempty"`
	Created time.Time `json:"created,omitzero"`
	// Server is the driver that serves the pool, unless it is shared.
	Server     *Server `json:"server,omitempty"`
	ReadOnly   bool    `json:"readOnly"`
	SystemDisk bool    `json:"systemDisk"`
	// SharesWith are the other pools of the node on the same filesystem.
	SharesWith []string `json:"sharesFilesystemWith,omitempty"`
	// Quota is what enforces the sizes of new volumes; empty for nothing, and then Unenforced
	// is why.
	Quota      string `json:"quota"`
	Unenforced string `json:"unenforced,omitempty"`

	// Space and Contents are fields of the pool's object in the document.
	Space
	Contents
}

// Space is that of a pool.
type Space struct {
	SizeBytes      *int64 `json:"sizeBytes"`
	FreeBytes      *int64 `json:"freeBytes"`
	PromisedBytes  *int64 `json:"promisedBytes"`
	AvailableBytes *int64 `json:"availableBytes"`
	// SetAsideBytes is beside the promises, for inodes that quotas do not count, and for overwriting shared blocks.
	SetAsideBytes *int64 `json:"setAsideBytes"`
	// TrashHeldBytes is what cannot be promised until the trash is erased.
	TrashHeldBytes *int64 `json:"trashHeldBytes"`
	Inodes         *int64 `json:"inodes"`
	InodesFree     *int64 `json:"inodesFree"`
}

// Contents are what a pool has, and what of it could not be read.
type Contents struct {
	Volumes   []Volume   `json:"volumes"`
	Snapshots []Snapshot `json:"snapshots"`
	Creating  []Leftover `json:"creating"`
	Trash     []Leftover `json:"trash"`
	// DevicesError is why no loop device is reported of any volume.
	DevicesError string `json:"devicesError,omitempty"`
	// SnapshotsError is why those of the upstream KubeVirt driver could not be listed.
	SnapshotsError string `json:"snapshotsError,omitempty"`
	// OnDeleted are loop devices of the driver on deleted files of the pool's filesystem.
	OnDeleted []Orphan `json:"devicesOnDeletedFiles,omitempty"`
}

// A Server is a driver.
type Server struct {
	Node  string    `json:"node"`
	Host  string    `json:"host"`
	Since time.Time `json:"since"`
}

// A Volume is one of a pool's volumes.
type Volume struct {
	ID        string `json:"id"`
	Mode      string `json:"mode"`
	Abnormal  bool   `json:"abnormal"`
	Condition string `json:"condition"`
	// Reason is what is wrong, in one word of pkg/health.
	Reason string `json:"reason,omitempty"`
	// Recorded: it has a record, readable or not. Lost: it has no directory.
	Recorded bool `json:"recorded"`
	Lost     bool `json:"lost"`
	Enforced bool `json:"enforced"`
	Thin     bool `json:"thin"`
	Inline   bool `json:"inline"`
	// Move is that of a volume which moves between nodes.
	Move *Move `json:"move,omitempty"`

	Created *time.Time `json:"created"`
	// Sizes are fields of the volume's object in the document.
	Sizes

	// Published are its mounts on this node, and Nodes all nodes that have any.
	Published []Place  `json:"published"`
	Nodes     []string `json:"nodes"`
	Devices   []Device `json:"devices"`
}

// Sizes are what a volume may take, and takes.
type Sizes struct {
	PromisedBytes *int64 `json:"promisedBytes"`
	LimitBytes    *int64 `json:"limitBytes"`
	UsedBytes     *int64 `json:"usedBytes"`
	// QuotaID is what the directory is counted by, RecordQuotaID the project id that its
	// record says; 0 for none.
	QuotaID       uint64 `json:"quotaID"`
	RecordQuotaID uint64 `json:"recordQuotaID"`
	// FileBytes and AllocatedBytes are of the file of a block volume.
	FileBytes      *int64 `json:"fileBytes"`
	AllocatedBytes *int64 `json:"allocatedBytes"`
	// Extents are those of the file: a snapshot that shares them has its writers wait for clone.PerExtent
	// for each.
	Extents *int `json:"extents"`
}

// A Snapshot is one of a pool's snapshots.
type Snapshot struct {
	Name      string `json:"name"`
	Abnormal  bool   `json:"abnormal"`
	Condition string `json:"condition"`
	// Reason is what is wrong, in one word of pkg/health.
	Reason string `json:"reason,omitempty"`
	// Lost: there is a record, but no directory.
	Lost bool `json:"lost"`

	// What follows is from the record, and absent without a readable one. Source is the id of
	// the volume.
	Source string `json:"source,omitempty"`
	Mode   string `json:"mode,omitempty"`
	// SizeBytes is the size of the smallest volume that can be made from it, and HeldBytes what
	// the pool keeps for it.
	SizeBytes   *int64     `json:"sizeBytes"`
	HeldBytes   *int64     `json:"heldBytes"`
	Method      string     `json:"method,omitempty"`
	Consistency string     `json:"consistency,omitempty"`
	Cut         *time.Time `json:"cut"`
	// TookMillis is how long reading the volume took, and StallMillis for how long those who write to
	// it had to wait at most.
	TookMillis  *int64 `json:"tookMillis"`
	StallMillis *int64 `json:"stallMillis"`
	// Upstream: it is of the upstream KubeVirt driver, in the pool's snapshotPath.
	Upstream bool `json:"upstream,omitempty"`
}

// A Move is what the record of a volume says while that moves.
type Move struct {
	ID string `json:"id"`
	// Role is source for the volume, which is not published any more, and target for its copy, which is none yet.
	Role string `json:"role"`
	Peer string `json:"peer"`
	// Whole: the target has all of the source. HandedOver: the source is not published any more, whatever becomes of the move.
	Whole      bool `json:"whole"`
	HandedOver bool `json:"handedOver"`
}

// A Place is where a volume, or what is inside it at that path, is mounted.
type Place struct {
	Path   string `json:"path"`
	Inside string `json:"inside,omitempty"`
}

// A Device is a loop device on the file of a block volume.
type Device struct {
	Name      string `json:"name"`
	SizeBytes int64  `json:"sizeBytes"`
	ReadOnly  bool   `json:"readOnly"`
	// Foreign: the driver did not attach it.
	Foreign bool `json:"foreign"`
}

// An Orphan is a loop device whose file is deleted. It keeps the file and its filesystem.
type Orphan struct {
	Name string `json:"name"`
	// File is where the file was, as far as the kernel knows.
	File      string `json:"file"`
	Condition string `json:"condition"`
}

func describeOrphan(d loop.Device) Orphan {
	return Orphan{Name: d.Name, File: d.FormerPath, Condition: "its file is deleted, and it keeps the filesystem busy; " +
		"the driver detaches it within a minute unless it is in use: `losetup --detach /dev/" + d.Name + "` detaches it when its last user closes it"}
}

// A Leftover is what is in creating/ or in the trash.
type Leftover struct {
	Node      string    `json:"node"`
	Name      string    `json:"name"`
	Changed   time.Time `json:"changed"`
	UsedBytes *int64    `json:"usedBytes"`
	// HeldBytes is what cannot be promised until it is erased; null for what is being made.
	HeldBytes *int64 `json:"heldBytes"`
	Abnormal  bool   `json:"abnormal"`
	Condition string `json:"condition"`
}

// WriteJSON writes the report for programs.
func (r *Report) WriteJSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(r)
}
