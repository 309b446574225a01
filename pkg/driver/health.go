package driver

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// The controller reports what the node does: a volume can be reached from nowhere else. Of a volume
// whose condition cannot be found out, a call returns an error: an answer without the condition would
// say that it is over.

// ControllerGetVolumeHealth reports what is wrong with one volume. Those of other nodes are NOT_FOUND.
func (c *controller) ControllerGetVolumeHealth(ctx context.Context, req *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	id, err := volume.ParseID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	found, err := c.pools.Health(ctx, id)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: volumeHealth(id, found)}, nil
}

// ControllerListVolumeHealth lists the volumes of this node that are not healthy, as ListVolumes lists
// all, as far as the last survey found them.
func (c *controller) ControllerListVolumeHealth(ctx context.Context, req *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
	after, most, err := parsePage(req)
	if err != nil {
		return nil, err
	}
	if err := checked(c.pools); err != nil {
		return nil, err
	}
	volumes, next, err := c.pools.ListIll(ctx, after, most)
	if err != nil {
		return nil, err
	}
	response := &csi.ControllerListVolumeHealthResponse{NextToken: nextToken(next)}
	for _, v := range volumes {
		response.Entries = append(response.Entries, volumeHealth(v.ID, v.Conditions))
	}
	return response, nil
}

// NodeGetVolumeHealth reports what is wrong with one volume, wherever it is published, and also if it is
// not: its publication may have failed because of that.
func (n *node) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	id, err := volume.ParseID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	for field, path := range map[string]string{"volume publish path": req.GetVolumePublishPath(), "staging target path": req.GetStagingTargetPath()} {
		if path != "" && !filepath.IsAbs(path) {
			return nil, invalid("the %s %q is not absolute", field, path)
		}
	}
	found, err := n.pools.HealthHere(ctx, id)
	if err != nil {
		return nil, err
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: volumeHealth(id, found)}, nil
}

// NodeGetStorageHealth reports each pool with which something is wrong, from memory.
func (n *node) NodeGetStorageHealth(context.Context, *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	if err := checked(n.pools); err != nil {
		return nil, err
	}
	return &csi.NodeGetStorageHealthResponse{BackendHealth: storageHealth(n.pools.Status())}, nil
}

// checked returns an error before each pool was checked for the first time.
func checked(pools *pool.Set) error {
	if !pools.Ready() {
		return fmt.Errorf("%w: not all pools are checked yet", volume.ErrUnavailable)
	}
	return nil
}

// The most that clients have to take: entries, and bytes of a message.
const (
	maxEntries       = 16
	maxHealthMessage = 1024
)

// volumeHealth is what is wrong with a volume as CSI has it. Each reason is there once, and has one status.
func volumeHealth(id volume.ID, found []health.Condition) *csi.VolumeHealth {
	h := &csi.VolumeHealth{VolumeId: id.String()}
	for _, c := range found[:min(len(found), maxEntries)] {
		h.HealthStatuses = append(h.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{
			Status: volumeStatus[c.Reason.Status()], Reason: string(c.Reason), Message: text(c.Message, maxHealthMessage),
		})
	}
	return h
}

var volumeStatus = map[health.Status]csi.VolumeHealthErrorType{
	health.Degraded:     csi.VolumeHealthErrorType_DEGRADED,
	health.Inaccessible: csi.VolumeHealthErrorType_INACCESSIBLE,
	health.DataLoss:     csi.VolumeHealthErrorType_DATA_LOSS,
}

// storageHealth is what is wrong with pools as CSI has it: each reason once, with all pools that have it.
func storageHealth(pools []pool.Status) []*csi.NodeGetStorageHealthResponse_StorageBackendHealth {
	messages := make(map[health.Reason][]string)
	for _, p := range pools {
		for _, c := range p.Conditions {
			messages[c.Reason] = append(messages[c.Reason], fmt.Sprintf("pool %q: %s", p.Name, c.Message))
		}
	}
	var all []*csi.NodeGetStorageHealthResponse_StorageBackendHealth
	for _, reason := range health.Reasons() {
		if len(messages[reason]) == 0 || len(all) == maxEntries {
			continue
		}
		status := csi.StorageHealthErrorType_STORAGE_DEGRADED
		if reason.OfPool() {
			status = csi.StorageHealthErrorType_STORAGE_UNREACHABLE
		}
		all = append(all, &csi.NodeGetStorageHealthResponse_StorageBackendHealth{
			Status: status, Reason: string(reason), Message: text(strings.Join(messages[reason], "; "), maxHealthMessage),
		})
	}
	return all
}

// text is what a message of protobuf can hold: paths need not be UTF-8.
func text(message string, most int) string { return bounded(strings.ToValidUTF8(message, "?"), most) }
