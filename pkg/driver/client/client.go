// Package client asks the driver that runs on this node, by its socket, what it is and what it has.
package client

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Client is a connection to a driver. It is made when it is first needed.
type Client struct{ connection *grpc.ClientConn }

// New is a client of the driver at a socket, by its absolute path.
func New(socket string) (*Client, error) {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	return &Client{connection}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.connection.Close() }

// Name is the driver's name, that of its CSIDriver object.
func (c *Client) Name(ctx context.Context) (string, error) {
	answer, err := csi.NewIdentityClient(c.connection).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	return answer.GetName(), err
}

// Available is how many bytes the driver can still promise to volumes of a StorageClass with those
// parameters; 0 for a pool that does not serve. It fails for a pool that the driver does not know.
func (c *Client) Available(ctx context.Context, parameters map[string]string) (int64, error) {
	answer, err := csi.NewControllerClient(c.connection).GetCapacity(ctx, &csi.GetCapacityRequest{
		Parameters: parameters,
		// With capabilities the driver says what is wrong with the parameters.
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}},
	})
	return answer.GetAvailableCapacity(), err
}

// A Volume is what a PersistentVolume says of one.
type Volume struct {
	// Context are the attributes of the PersistentVolume.
	Context map[string]string
	// Segments are the labels of nodes from which the volume can be reached, any one of them; none for all nodes.
	Segments []map[string]string
}

// Volume asks the driver for a volume, which it looks for on the disk. Errors: volume.ErrNotFound.
func (c *Client) Volume(ctx context.Context, id volume.ID) (Volume, error) {
	answer, err := csi.NewControllerClient(c.connection).ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id.String()})
	if status.Code(err) == codes.NotFound {
		return Volume{}, fmt.Errorf("%w: %w", volume.ErrNotFound, err)
	}
	if err != nil {
		return Volume{}, err
	}
	v := Volume{Context: answer.GetVolume().GetVolumeContext()}
	for _, topology := range answer.GetVolume().GetAccessibleTopology() {
		v.Segments = append(v.Segments, topology.GetSegments())
	}
	return v, nil
}
