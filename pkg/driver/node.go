package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"kubevirt.io/hostpath-provisioner/pkg/driver/csi112"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

type node struct {
	csi.UnimplementedNodeServer
	config Config
	pools  *pool.Set
}

// NodeGetCapabilities reports what the node service can do.
func (n *node) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	var capabilities []*csi.NodeServiceCapability
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi112.NodeVolumeCondition,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	} {
		capabilities = append(capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: capabilities}, nil
}

// NodeGetInfo reports the node's id and its topology segment.
func (n *node) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{
		NodeId:             n.config.Node.String(),
		AccessibleTopology: n.config.topology(false)[0],
	}, nil
}

// NodePublishVolume makes a volume appear at a path. Doing it twice is one mount.
func (n *node) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	publication, err := parsePublication(req)
	if err != nil {
		return nil, err
	}
	unlock, err := n.pools.Publications().Lock(publication)
	if err != nil {
		return nil, err
	}
	defer unlock()

	if publication.Inline {
		err = n.publishInline(ctx, req, publication)
	} else {
		err = n.pools.Publications().Publish(ctx, publication)
	}
	if err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

func parsePublication(req *csi.NodePublishVolumeRequest) (pool.Publication, error) {
	id, err := volume.ParseID(req.GetVolumeId())
	if err != nil {
		return pool.Publication{}, err
	}
	target, err := parseTarget("target path", req.GetTargetPath())
	if err != nil {
		return pool.Publication{}, err
	}
	wanted, err := parseAccess(req.GetVolumeCapability())
	if err != nil {
		return pool.Publication{}, err
	}
	name, err := parsePool(req.GetVolumeContext())
	if err != nil {
		return pool.Publication{}, err
	}
	return pool.Publication{
		ID:           id,
		Pool:         name,
		Target:       target,
		Mode:         wanted.mode,
		Flags:        wanted.flags,
		ReadOnly:     req.GetReadonly() || wanted.readOnly,
		SingleTarget: wanted.singleTarget,
		MultiNode:    wanted.multiNode,
		Inline:       req.GetVolumeContext()[ephemeralKey] == "true",
	}, nil
}

// publishInline makes the volume that a pod has in its own manifest.
func (n *node) publishInline(ctx context.Context, req *csi.NodePublishVolumeRequest, publication pool.Publication) error {
	if publication.Mode != volume.ModeMount {
		return invalid("an ephemeral volume is a directory and cannot be a block device")
	}
	create := pool.Request{ID: publication.ID, Pool: publication.Pool}
	if size, ok := req.GetVolumeContext()[sizeKey]; ok {
		bytes, err := volume.ParseBytes(size)
		switch {
		case errors.Is(err, volume.ErrInvalid):
			return fmt.Errorf("the volume attribute %q: %w", sizeKey, err)
		case err != nil:
			return invalid("the volume attribute %q: %v", sizeKey, err)
		}
		create.Range.Required = bytes
	}
	return n.pools.Publications().PublishInline(ctx, create, publication)
}

// NodeUnpublishVolume undoes NodePublishVolume. Nothing to undo is success.
func (n *node) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	id, err := volume.ParseID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	target, err := parseTarget("target path", req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	unlock, err := n.pools.ShareTarget(id, target)
	if err != nil {
		return nil, err
	}
	defer unlock()

	if err := n.pools.Publications().Unpublish(ctx, id, target); err != nil {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// NodeGetVolumeStats measures a published volume. It does not hold the volume's lock
// while it reads, and takes it for an instant where limit and promise, or record and
// directory, seem to differ: a call that comes just then waits for that.
func (n *node) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	id, err := volume.ParseID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	at, err := parsePath(id, req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	stats, err := n.pools.Publications().Stats(ctx, id, at)
	if err != nil {
		return nil, err
	}
	response := &csi.NodeGetVolumeStatsResponse{Usage: usage(stats)}
	csi112.AddCondition(response, stats.Condition.Abnormal, stats.Condition.Message)
	return response, nil
}

// parsePath takes the path at which a volume is said to be published. At one where nothing
// can be published the volume is not found, also if the path is relative: csi-sanity wants
// that. A string that cannot be a path at all is invalid.
func parsePath(id volume.ID, path string) (bind.Target, error) {
	switch {
	case path == "":
		return bind.Target{}, invalid("the volume path is empty")
	case strings.ContainsRune(path, 0):
		return bind.Target{}, invalid("the volume path has a NUL byte: %q", path)
	}
	at, err := bind.ParseTarget(path)
	if err != nil {
		return bind.Target{}, fmt.Errorf("volume %s: %w: %w", id, volume.ErrNotFound, err)
	}
	return at, nil
}

// NodeExpandVolume raises a volume's size while it is in use. The controller's part
// of an expansion is not there: it would not be called on the volume's node.
func (n *node) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	id, err := volume.ParseID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	at, err := parsePath(id, req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	unlock, err := n.pools.Lock(id)
	if err != nil {
		return nil, err
	}
	defer unlock()

	bytes, err := n.pools.Expand(ctx, id, at, parseType(req.GetVolumeCapability()), parseRange(req.GetCapacityRange()))
	if err != nil {
		return nil, err
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: bytes}, nil
}

// usage leaves out what the filesystem does not count, and what only the user of a
// device knows.
func usage(stats pool.Stats) []*csi.VolumeUsage {
	space := stats.Space
	if stats.Mode == volume.ModeBlock && space.SizeBytes == 0 {
		return nil // its file is lost
	}
	if stats.Mode == volume.ModeBlock {
		return []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: space.SizeBytes}}
	}
	var all []*csi.VolumeUsage
	if space.SizeBytes > 0 {
		all = append(all, &csi.VolumeUsage{
			Unit:      csi.VolumeUsage_BYTES,
			Total:     space.SizeBytes,
			Used:      space.UsedBytes,
			Available: space.FreeBytes,
		})
	}
	if space.Inodes > 0 {
		all = append(all, &csi.VolumeUsage{
			Unit:      csi.VolumeUsage_INODES,
			Total:     space.Inodes,
			Used:      space.InodesUsed,
			Available: space.InodesFree,
		})
	}
	return all
}
