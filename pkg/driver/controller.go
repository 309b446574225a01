package driver

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"kubevirt.io/hostpath-provisioner/pkg/driver/client"
	"kubevirt.io/hostpath-provisioner/pkg/driver/csi112"
	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

type controller struct {
	csi.UnimplementedControllerServer
	config Config
	pools  *pool.Set
}

// ControllerGetCapabilities reports what the controller service can do.
func (c *controller) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	var capabilities []*csi.ControllerServiceCapability
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_GET_VOLUME,
		csi112.ControllerVolumeCondition,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.ControllerServiceCapability_RPC_LIST_VOLUME_HEALTH,
	} {
		capabilities = append(capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: capabilities}, nil
}

// CreateVolume makes a volume on this node. Repeating it gives the same answer.
func (c *controller) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	request, err := c.parseCreate(req)
	if err != nil {
		return nil, err
	}
	unlock, err := c.pools.Lock(request.ID)
	if err != nil {
		return nil, err
	}
	defer unlock()

	v, err := c.pools.Create(ctx, request)
	if err != nil {
		return nil, err
	}
	made := c.describe(v)
	made.ContentSource = req.GetVolumeContentSource() // or it would not be what was asked for
	return &csi.CreateVolumeResponse{Volume: made}, nil
}

func (c *controller) parseCreate(req *csi.CreateVolumeRequest) (pool.Request, error) {
	if req.GetName() == "" {
		return pool.Request{}, invalid("the volume name is empty")
	}
	id, err := volume.ParseID(req.GetName())
	if err != nil {
		return pool.Request{}, err
	}
	wanted, err := parseAccesses(req.GetVolumeCapabilities())
	if err != nil {
		return pool.Request{}, err
	}
	name, err := parsePool(req.GetParameters())
	if err != nil {
		return pool.Request{}, err
	}
	if len(req.GetMutableParameters()) > 0 {
		return pool.Request{}, errMutable
	}
	source, err := c.parseSource(req)
	if err != nil {
		return pool.Request{}, err
	}
	return pool.Request{
		ID:             id,
		Pool:           name,
		Range:          parseRange(req.GetCapacityRange()),
		Mode:           wanted.mode,
		MultiNode:      wanted.multiNode,
		OtherNodesOnly: !c.config.meets(req.GetAccessibilityRequirements()),
		Source:         source,
	}, nil
}

var errMutable = invalid("a volume has no mutable parameters")

// DeleteVolume removes a volume. Deleting one that does not exist succeeds; one
// that is still published is refused, because the kernel would let its data go.
func (c *controller) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	id, err := volume.ParseID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	unlock, err := c.pools.Lock(id)
	if err != nil {
		return nil, err
	}
	defer unlock()

	only := onlyIf(ctx)
	err = c.pools.DeleteOnly(ctx, id, only)
	if err != nil && (only != "" || !errors.Is(err, volume.ErrNotFound)) {
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// OnlyIfKey is metadata of a DeleteVolume by an administrator: the volume is deleted only if it
// is abnormal for the reason that is the value, as package health has them.
const OnlyIfKey = "hostpath-only-if"

func onlyIf(ctx context.Context) health.Reason {
	if values := metadata.ValueFromIncomingContext(ctx, OnlyIfKey); len(values) > 0 {
		return health.Reason(values[0])
	}
	return ""
}

// ValidateVolumeCapabilities confirms what a volume can be used for.
func (c *controller) ValidateVolumeCapabilities(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	id, err := volume.ParseID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := checkComplete(req.GetVolumeCapabilities()); err != nil {
		return nil, err
	}
	v, err := c.pools.Volume(ctx, id)
	if err != nil {
		return nil, err
	}
	if v.Condition.Reason.OfPool() {
		return nil, fmt.Errorf("volume %s: %w: %s", id, volume.ErrUnavailable, v.Condition.Message)
	}
	if v.Lost {
		return nil, fmt.Errorf("volume %s: %w: %s", id, volume.ErrNotFound, v.Condition.Message)
	}
	if why := unconfirmed(req, v); why != "" {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: why}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{
		Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
			VolumeContext:      req.GetVolumeContext(),
			VolumeCapabilities: req.GetVolumeCapabilities(),
			Parameters:         req.GetParameters(),
		},
	}, nil
}

// unconfirmed is why a volume is not what the request describes; empty if it is.
func unconfirmed(req *csi.ValidateVolumeCapabilitiesRequest, v pool.Volume) string {
	wanted, err := parseAccesses(req.GetVolumeCapabilities())
	if err != nil {
		return err.Error()
	}
	if len(req.GetMutableParameters()) > 0 {
		return errMutable.Error()
	}
	if wanted.mode != v.Mode {
		return fmt.Sprintf("the volume has the mode %s, not %s", v.Mode, wanted.mode)
	}
	if wanted.multiNode && !v.MultiNode {
		return fmt.Sprintf("pool %q is not shared between nodes, nor allows their access modes for several pods of one node", v.Pool)
	}
	for _, described := range []map[string]string{req.GetVolumeContext(), req.GetParameters()} {
		name, err := parsePool(described)
		if err != nil {
			return err.Error()
		}
		if name != (volume.PoolName{}) && name != v.Pool {
			return fmt.Sprintf("the volume is in pool %q, not in %q", v.Pool, name)
		}
	}
	return ""
}

// ListVolumes lists the volumes of this node in the order of their ids. A token is
// the last id of a page, so that it survives what comes and goes between pages.
func (c *controller) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	after, most, err := parsePage(req)
	if err != nil {
		return nil, err
	}
	volumes, next := c.pools.List(ctx, after, most)
	response := &csi.ListVolumesResponse{}
	for _, v := range volumes {
		status := &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: nodeIDs(v.Nodes)}
		csi112.AddCondition(status, v.Condition.Abnormal, v.Condition.Message)
		response.Entries = append(response.Entries, &csi.ListVolumesResponse_Entry{Volume: c.describe(v), Status: status})
	}
	response.NextToken = nextToken(next)
	return response, nil
}

// parsePage is what a page of volumes begins after, and how many are in it.
func parsePage(req interface {
	GetMaxEntries() int32
	GetStartingToken() string
},
) (after volume.ID, most int, err error) {
	if req.GetMaxEntries() < 0 {
		return volume.ID{}, 0, invalid("max_entries is negative: %d", req.GetMaxEntries())
	}
	after, err = parseToken(req.GetStartingToken())
	most = int(req.GetMaxEntries())
	if most == 0 || most > maxPage {
		most = maxPage
	}
	return after, most, err
}

// nextToken is the token of a page after an id; empty if there is none.
func nextToken(next volume.ID) string {
	if next == (volume.ID{}) {
		return ""
	}
	return tokenPrefix + next.String()
}

// maxPage keeps a page below the 4 MiB that gRPC clients take by default, and the memory of
// a driver with very many volumes near to that of one with few: external-health-monitor sets
// no max_entries, which leaves it to the plugin.
const maxPage = 1000

// tokenPrefix cannot be the beginning of an id.
const tokenPrefix = "after:"

// parseToken is the id that a page begins after; the zero id for the first page.
func parseToken(token string) (volume.ID, error) {
	if token == "" {
		return volume.ID{}, nil
	}
	name, ok := strings.CutPrefix(token, tokenPrefix)
	id, err := volume.ParseID(name)
	if !ok || err != nil {
		return volume.ID{}, status.Errorf(codes.Aborted, "the starting token %q is not one of this driver; begin again without one", token)
	}
	return id, nil
}

// ControllerGetVolume reports on one volume. Those of other nodes are NOT_FOUND.
func (c *controller) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	id, err := volume.ParseID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	v, err := c.pools.Volume(ctx, id)
	if err != nil {
		return nil, err
	}
	status := &csi.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: nodeIDs(v.Nodes)}
	csi112.AddCondition(status, v.Condition.Abnormal, v.Condition.Message)
	return &csi.ControllerGetVolumeResponse{Volume: c.describe(v), Status: status}, nil
}

// GetCapacity reports what a pool can still promise. A pool that does not serve has
// nothing: an error would leave the scheduler with the last number. The largest
// volume is the same, since the scheduler prefers that field. A pool that does not
// serve has no largest volume, by which it differs from a full one: see
// docs/decisions/0058.
//
// Parameters that CreateVolume refuses have nothing available and no limit to a
// volume: then the scheduler chooses a node, CreateVolume is called there, and its
// refusal is what the user reads. With capabilities the question is about one volume,
// and the refusal is the answer. See docs/decisions/0015.
func (c *controller) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if err := c.sendDirectory(ctx, req.GetParameters()); err != nil {
		return nil, err
	}
	here := req.GetAccessibleTopology() == nil || c.config.includes([]*csi.Topology{req.GetAccessibleTopology()})
	name, shared, err := c.capacityOf(req.GetParameters())
	switch {
	case err != nil && len(req.GetVolumeCapabilities()) > 0:
		return nil, err
	case err != nil:
		return refused(here), nil //nolint:nilerr // CreateVolume says it
	}
	if !here && !shared {
		return available(0), nil
	}
	var wanted access
	if len(req.GetVolumeCapabilities()) > 0 {
		if wanted, err = parseAccesses(req.GetVolumeCapabilities()); err != nil {
			return available(0), nil //nolint:nilerr // no volume of that kind fits
		}
	}
	bytes, err := c.pools.Capacity(ctx, name, wanted.multiNode)
	switch {
	case err != nil:
		return nil, err
	case bytes == 0 && !c.pools.Serves(ctx, name):
		return &csi.GetCapacityResponse{}, nil
	}
	return available(bytes), nil
}

// sendDirectory answers a client on this node that asks which directory a pool is.
func (c *controller) sendDirectory(ctx context.Context, parameters map[string]string) error {
	if len(metadata.ValueFromIncomingContext(ctx, client.DirectoryKey)) == 0 {
		return nil
	}
	name, err := parsePool(parameters)
	if err != nil {
		return err
	}
	directory, err := c.pools.Directory(ctx, name)
	if err != nil {
		return err
	}
	return grpc.SetHeader(ctx, metadata.Pairs(client.DirectoryKey, directory.String()))
}

// capacityOf is the pool that parameters choose, and whether several nodes serve it.
func (c *controller) capacityOf(parameters map[string]string) (volume.PoolName, bool, error) {
	name, err := parsePool(parameters)
	if err != nil {
		return volume.PoolName{}, false, err
	}
	shared, err := c.pools.Shared(name)
	return name, shared, err
}

func available(bytes int64) *csi.GetCapacityResponse {
	return &csi.GetCapacityResponse{AvailableCapacity: bytes, MaximumVolumeSize: wrapperspb.Int64(bytes)}
}

// refused is the capacity of what CreateVolume refuses wherever it is asked.
func refused(here bool) *csi.GetCapacityResponse {
	answer := available(0)
	if here {
		answer.MaximumVolumeSize = wrapperspb.Int64(volume.MaxBytes)
	}
	return answer
}

// describe is a volume as CSI has it.
func (c *controller) describe(v pool.Volume) *csi.Volume {
	return &csi.Volume{
		VolumeId:           v.ID.String(),
		CapacityBytes:      v.Bytes,
		AccessibleTopology: c.config.topology(v.Shared),
		VolumeContext: map[string]string{
			poolKey:     v.Pool.String(),
			enforcedKey: strconv.FormatBool(v.Enforced),
		},
	}
}

func nodeIDs(nodes []volume.NodeID) []string {
	var ids []string
	for _, node := range nodes {
		ids = append(ids, node.String())
	}
	return ids
}
