package drivertest

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// Snapshot makes a snapshot of a volume. The consistency is the parameter of that name; empty
// for none.
func (c *Client) Snapshot(ctx context.Context, name, of, consistency string) (*csi.Snapshot, error) {
	request := &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: of}
	if consistency != "" {
		request.Parameters = map[string]string{"consistency": consistency}
	}
	made, err := c.Controller().CreateSnapshot(ctx, request)
	return made.GetSnapshot(), err
}

// DeleteSnapshot removes a snapshot.
func (c *Client) DeleteSnapshot(ctx context.Context, id string) error {
	_, err := c.Controller().DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
	return err
}

// Snapshots are all that the driver lists of a volume, or of all if that is empty.
func (c *Client) Snapshots(ctx context.Context, of string) ([]*csi.Snapshot, error) {
	list, err := c.Controller().ListSnapshots(ctx, &csi.ListSnapshotsRequest{SourceVolumeId: of})
	var all []*csi.Snapshot
	for _, e := range list.GetEntries() {
		all = append(all, e.GetSnapshot())
	}
	return all, err
}

// Restore makes a volume from a snapshot.
func (c *Client) Restore(ctx context.Context, v Volume, snapshot string) (*csi.CreateVolumeResponse, error) {
	return c.createFrom(ctx, v, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot},
	}})
}

// Clone makes a volume from another.
func (c *Client) Clone(ctx context.Context, v Volume, source string) (*csi.CreateVolumeResponse, error) {
	return c.createFrom(ctx, v, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: source},
	}})
}

func (c *Client) createFrom(ctx context.Context, v Volume, from *csi.VolumeContentSource) (*csi.CreateVolumeResponse, error) {
	return c.Controller().CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:                v.ID,
		CapacityRange:       v.capacity(),
		VolumeCapabilities:  []*csi.VolumeCapability{v.Capability()},
		Parameters:          v.Parameters(),
		VolumeContentSource: from,
	})
}
