// Package client asks the driver that runs on this node, by its socket, what it is and what it has.
package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
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

// DirectoryKey is metadata of a GetCapacity that asks which directory the pool is, and of the answer.
const DirectoryKey = "hostpath-directory"

// Directory is the directory of the pool that a StorageClass with those parameters chooses. It fails for a pool that the driver does not
// know or serve, and for a driver that does not say: what it has may be another one.
func (c *Client) Directory(ctx context.Context, parameters map[string]string) (dir.ID, error) {
	var answer metadata.MD
	asking := metadata.AppendToOutgoingContext(ctx, DirectoryKey, "?")
	if _, err := csi.NewControllerClient(c.connection).GetCapacity(asking, &csi.GetCapacityRequest{Parameters: parameters}, grpc.Header(&answer)); err != nil {
		return dir.ID{}, err
	}
	said := answer.Get(DirectoryKey)
	if len(said) == 0 {
		return dir.ID{}, errors.New("it does not say which directory its pool is: update it to the version of this program")
	}
	id, err := dir.ParseID(said[0])
	if err != nil {
		return dir.ID{}, fmt.Errorf("read which directory its pool is: %w", err)
	}
	return id, nil
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
