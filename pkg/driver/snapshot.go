package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Parameters of a VolumeSnapshotClass.
const (
	// consistencyKey says what to do with a directory that is written to while it is copied.
	consistencyKey = "consistency"
	// maxStallKey is for how long a snapshot may stop those who write, as Go has durations.
	maxStallKey = "maxStall"
)

// A handle names a snapshot in CSI: its name and the node that has it. A snapshot that was moved
// with its disk is found by its name; by the node, one that is elsewhere differs from one that is gone.
type handle struct {
	id   volume.ID
	node string // empty if the handle names none
}

// handleSeparator is no character of names.
const handleSeparator = "@"

// parseHandle takes a snapshot id as describeSnapshot returns it.
func parseHandle(id string) (handle, error) {
	if id == "" {
		return handle{}, invalid("the snapshot id is empty")
	}
	name, node, _ := strings.Cut(id, handleSeparator)
	parsed, err := volume.ParseSnapshot(name)
	if err != nil {
		return handle{}, err
	}
	return handle{id: parsed, node: node}, nil
}

// elsewhere reports whether a snapshot that is not here may be on another node.
func (c *controller) elsewhere(h handle) bool {
	return h.node != "" && h.node != c.config.Node.String()
}

// CreateSnapshot makes a snapshot of a volume on this node. Repeating it gives the same answer,
// and ABORTED while it is being made: that may take longer than a call.
func (c *controller) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	request, err := parseCreateSnapshot(req)
	if err != nil {
		return nil, err
	}
	if !c.config.meets(req.GetAccessibilityRequirements()) {
		return nil, fmt.Errorf("snapshot volume %s: %w: a snapshot is where its volume is, on node %s", request.Source, volume.ErrOtherNode, c.config.Node)
	}
	unlock, err := c.pools.Lock(request.ID)
	if err != nil {
		return nil, err
	}
	defer unlock()

	made, err := c.pools.Snapshots().Create(ctx, request)
	if err != nil {
		return nil, err
	}
	return &csi.CreateSnapshotResponse{Snapshot: c.describeSnapshot(made)}, nil
}

func parseCreateSnapshot(req *csi.CreateSnapshotRequest) (pool.SnapshotRequest, error) {
	if req.GetName() == "" {
		return pool.SnapshotRequest{}, invalid("the snapshot name is empty")
	}
	if req.GetSourceVolumeId() == "" {
		return pool.SnapshotRequest{}, invalid("the source volume id is empty")
	}
	id, err := volume.ParseSnapshot(req.GetName())
	if err != nil {
		return pool.SnapshotRequest{}, err
	}
	source, err := volume.ParseID(req.GetSourceVolumeId())
	if err != nil {
		return pool.SnapshotRequest{}, err
	}
	request := pool.SnapshotRequest{ID: id, Source: source}
	request.Way, err = parseWay(req.GetParameters())
	return request, err
}

// parseWay reads the parameters of a VolumeSnapshotClass. Unknown keys are left alone, as those of a
// StorageClass are.
func parseWay(parameters map[string]string) (way pool.CopyWay, err error) {
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		for _, known := range []string{consistencyKey, maxStallKey} {
			if key != known && strings.EqualFold(key, known) {
				return way, invalid("the parameter %q is unknown, it is spelled %q", key, known)
			}
		}
	}
	way.WhenWritten = volume.WhenWritten(cmp.Or(parameters[consistencyKey], string(volume.Verify)))
	if !way.WhenWritten.Valid() {
		return way, invalid(`the parameter %q is %q; "verify", "freeze" and "accept" are supported`, consistencyKey, way.WhenWritten)
	}
	if value := parameters[maxStallKey]; value != "" {
		if way.MaxStall, err = time.ParseDuration(value); err != nil || way.MaxStall <= 0 {
			return way, invalid("the parameter %q is %q; it takes a time such as 500ms or 2s", maxStallKey, value)
		}
	}
	return way, nil
}

// DeleteSnapshot removes a snapshot. Deleting one that does not exist succeeds, unless its id
// says that it is on another node.
func (c *controller) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	if req.GetSnapshotId() == "" {
		return nil, invalid("the snapshot id is empty")
	}
	h, err := parseHandle(req.GetSnapshotId())
	if err != nil {
		return &csi.DeleteSnapshotResponse{}, nil // there is none of such an id
	}
	unlock, err := c.pools.Lock(h.id)
	if err != nil {
		return nil, err
	}
	defer unlock()

	err = c.pools.Snapshots().Delete(ctx, h.id)
	if errors.Is(err, volume.ErrNotFound) {
		err = c.deleteAbsent(ctx, h)
	}
	if err != nil {
		return nil, err
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

// deleteAbsent removes what is no snapshot of this driver on this node. An id without a node may be
// one of the upstream KubeVirt driver; one of another node is ErrPrecondition.
func (c *controller) deleteAbsent(ctx context.Context, h handle) error {
	if c.elsewhere(h) {
		name, _ := h.id.Snapshot()
		return fmt.Errorf("%w: snapshot %s is on node %s, this is %s", volume.ErrPrecondition, name, h.node, c.config.Node)
	}
	if h.node != "" {
		return nil
	}
	err := c.pools.Snapshots().DeleteUpstream(ctx, h.id)
	if errors.Is(err, volume.ErrNotFound) {
		return nil
	}
	return err
}

// findSnapshot finds a snapshot of this driver, or one of the upstream KubeVirt driver, whose ids name
// no node.
func (c *controller) findSnapshot(ctx context.Context, h handle) (pool.Snapshot, error) {
	found, err := c.pools.Snapshots().Find(ctx, h.id)
	if h.node == "" && errors.Is(err, volume.ErrNotFound) {
		return c.pools.Snapshots().FindUpstream(ctx, h.id)
	}
	return found, err
}

// GetSnapshot reports on one snapshot.
func (c *controller) GetSnapshot(ctx context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	h, err := parseHandle(req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	found, err := c.findSnapshot(ctx, h)
	if err != nil {
		return nil, err
	}
	return &csi.GetSnapshotResponse{Snapshot: c.describeSnapshot(found)}, nil
}

// ListSnapshots lists the snapshots of this node in the order of their names. A token is the
// last name of a page, so that it survives what comes and goes between pages.
func (c *controller) ListSnapshots(ctx context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	if req.GetMaxEntries() < 0 {
		return nil, invalid("max_entries is negative: %d", req.GetMaxEntries())
	}
	after, err := parseSnapshotToken(req.GetStartingToken())
	if err != nil {
		return nil, err
	}
	if req.GetSnapshotId() != "" {
		return c.listOne(ctx, req)
	}
	var of volume.ID
	if req.GetSourceVolumeId() != "" {
		if of, err = volume.ParseID(req.GetSourceVolumeId()); err != nil {
			return &csi.ListSnapshotsResponse{}, nil //nolint:nilerr // there is no volume of such an id
		}
	}
	most := int(req.GetMaxEntries())
	if most == 0 || most > maxPage {
		most = maxPage
	}
	page, next := c.pools.Snapshots().List(ctx, after, of, most)
	response := &csi.ListSnapshotsResponse{}
	for _, s := range page {
		response.Entries = append(response.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: c.describeSnapshot(s)})
	}
	if name, more := next.Snapshot(); more {
		response.NextToken = tokenPrefix + name
	}
	return response, nil
}

// listOne returns an empty list for an unknown id.
func (c *controller) listOne(ctx context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	h, err := parseHandle(req.GetSnapshotId())
	if err != nil {
		return &csi.ListSnapshotsResponse{}, nil //nolint:nilerr // there is none of such an id
	}
	found, err := c.findSnapshot(ctx, h)
	switch {
	case errors.Is(err, volume.ErrNotFound):
		return &csi.ListSnapshotsResponse{}, nil
	case err != nil:
		return nil, err
	case req.GetSourceVolumeId() != "" && req.GetSourceVolumeId() != found.Origin.ID:
		return &csi.ListSnapshotsResponse{}, nil
	}
	return &csi.ListSnapshotsResponse{Entries: []*csi.ListSnapshotsResponse_Entry{{Snapshot: c.describeSnapshot(found)}}}, nil
}

func parseSnapshotToken(token string) (volume.ID, error) {
	if token == "" {
		return volume.ID{}, nil
	}
	name, ok := strings.CutPrefix(token, tokenPrefix)
	id, err := volume.ParseSnapshot(name)
	if !ok || err != nil {
		return volume.ID{}, status.Errorf(codes.Aborted, "the starting token %q is not one of this driver; begin again without one", token)
	}
	return id, nil
}

// describeSnapshot is a snapshot as CSI has it. Its size is that of the smallest volume that can
// be made from it, and 0 of one of the upstream KubeVirt driver, which is not known.
func (c *controller) describeSnapshot(s pool.Snapshot) *csi.Snapshot {
	id, _ := s.ID.Snapshot()
	if !s.Upstream {
		id += handleSeparator + c.config.Node.String()
	}
	return &csi.Snapshot{
		SnapshotId:         id,
		SourceVolumeId:     s.Origin.ID,
		SizeBytes:          s.Origin.Bytes,
		CreationTime:       timestamppb.New(s.Origin.Cut),
		ReadyToUse:         !s.Lost,
		AccessibleTopology: c.config.topology(false), // no shared pool has snapshots
	}
}

// parseSource is what a new volume is to be made from; nil for nothing.
func (c *controller) parseSource(req *csi.CreateVolumeRequest) (*pool.Source, error) {
	content := req.GetVolumeContentSource()
	switch {
	case content == nil:
		return nil, nil
	case content.GetSnapshot() != nil:
		h, err := parseHandle(content.GetSnapshot().GetSnapshotId())
		return &pool.Source{ID: h.id, Elsewhere: c.elsewhere(h), On: h.node, Upstream: h.node == ""}, err
	case content.GetVolume() != nil:
		id, err := volume.ParseID(content.GetVolume().GetVolumeId())
		return &pool.Source{ID: id, Elsewhere: req.GetAccessibilityRequirements() != nil}, err
	}
	return nil, invalid("the content source is neither a snapshot nor a volume")
}
