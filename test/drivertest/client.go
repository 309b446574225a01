package drivertest

import (
	"context"
	"os"
	"path/filepath"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// A Volume is what is asked for, and by what calls know it then.
type Volume struct {
	ID string
	// Pool may be empty where there is only one.
	Pool  string
	Block bool
	Bytes int64
	// Inline volumes are made by their publication.
	Inline bool
}

// Parameters are those of a StorageClass, and the context of its volumes.
func (v Volume) Parameters() map[string]string {
	if v.Pool == "" {
		return nil
	}
	return map[string]string{"storagePool": v.Pool}
}

// Capability is how the volume is used: on one node, by any number of pods.
func (v Volume) Capability() *csi.VolumeCapability {
	c := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
	}
	if v.Block {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}}
	}
	return c
}

func (v Volume) capacity() *csi.CapacityRange { return &csi.CapacityRange{RequiredBytes: v.Bytes} }

// attributes are the volume's context as kubelet has it, with what it adds itself.
func (v Volume) attributes() map[string]string {
	attributes := v.Parameters()
	if !v.Inline {
		return attributes
	}
	if attributes == nil {
		attributes = make(map[string]string)
	}
	attributes["csi.storage.k8s.io/ephemeral"] = "true"
	attributes["csi.storage.k8s.io/pod.name"] = "pod"
	attributes["csi.storage.k8s.io/pod.namespace"] = "default"
	attributes["csi.storage.k8s.io/pod.uid"] = "uid"
	attributes["size"] = strconv.FormatInt(v.Bytes, 10)
	return attributes
}

// A Client asks a driver what kubelet, external-provisioner and external-resizer ask,
// and with the errors that it answers. It is for concurrent use while no test ends or
// starts the driver.
type Client struct {
	Process *Process
	// Targets is the directory below which volumes are published.
	Targets string
}

// Identity is the driver's identity service.
func (c *Client) Identity() csi.IdentityClient { return csi.NewIdentityClient(c.Process.Conn()) }

// Controller is what external-provisioner calls.
func (c *Client) Controller() csi.ControllerClient { return csi.NewControllerClient(c.Process.Conn()) }

// Kubelet is what kubelet calls.
func (c *Client) Kubelet() csi.NodeClient { return csi.NewNodeClient(c.Process.Conn()) }

// Create makes a volume.
func (c *Client) Create(ctx context.Context, v Volume) (*csi.CreateVolumeResponse, error) {
	return c.Controller().CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:               v.ID,
		CapacityRange:      v.capacity(),
		VolumeCapabilities: []*csi.VolumeCapability{v.Capability()},
		Parameters:         v.Parameters(),
	})
}

// Delete removes a volume.
func (c *Client) Delete(ctx context.Context, id string) error {
	_, err := c.Controller().DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	return err
}

// Target is where a volume is published for a pod.
func (c *Client) Target(pod string) string { return filepath.Join(c.Targets, pod, "target") }

// Publish makes the directory that kubelet would make, and publishes a volume there.
func (c *Client) Publish(ctx context.Context, v Volume, pod string) error {
	return c.publish(ctx, v, pod, false)
}

// PublishReadOnly is Publish for a pod that must not write.
func (c *Client) PublishReadOnly(ctx context.Context, v Volume, pod string) error {
	return c.publish(ctx, v, pod, true)
}

func (c *Client) publish(ctx context.Context, v Volume, pod string, readOnly bool) error {
	if err := os.MkdirAll(filepath.Dir(c.Target(pod)), 0o755); err != nil {
		return err
	}
	_, err := c.Kubelet().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: v.ID, TargetPath: c.Target(pod), VolumeCapability: v.Capability(), VolumeContext: v.attributes(), Readonly: readOnly,
	})
	return err
}

// Unpublish takes a volume from a pod.
func (c *Client) Unpublish(ctx context.Context, id, pod string) error {
	_, err := c.Kubelet().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: c.Target(pod)})
	return err
}

// Expand lets a volume that a pod has grow to the bytes that v says.
func (c *Client) Expand(ctx context.Context, v Volume, pod string) (*csi.NodeExpandVolumeResponse, error) {
	return c.Kubelet().NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
		VolumeId: v.ID, VolumePath: c.Target(pod), VolumeCapability: v.Capability(), CapacityRange: v.capacity(),
	})
}

// Stats is what is used of a volume that a pod has.
func (c *Client) Stats(ctx context.Context, id, pod string) (*csi.NodeGetVolumeStatsResponse, error) {
	return c.Kubelet().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: c.Target(pod)})
}

// Get is what the driver reports of a volume.
func (c *Client) Get(ctx context.Context, id string) (*csi.ControllerGetVolumeResponse, error) {
	return c.Controller().ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
}

// List is what the driver reports of all volumes, page by page. A page has as many as the
// driver likes if pageSize is 0.
func (c *Client) List(ctx context.Context, pageSize int32) ([]*csi.ListVolumesResponse_Entry, error) {
	var all []*csi.ListVolumesResponse_Entry
	for token := ""; ; {
		page, err := c.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: pageSize, StartingToken: token})
		if err != nil {
			return nil, err
		}
		all = append(all, page.GetEntries()...)
		if token = page.GetNextToken(); token == "" {
			return all, nil
		}
	}
}

// Capacity is what a pool can still promise, in bytes. The name may be empty where
// there is only one.
func (c *Client) Capacity(ctx context.Context, pool string) (int64, error) {
	got, err := c.Controller().GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: Volume{Pool: pool}.Parameters()})
	return got.GetAvailableCapacity(), err
}
