// Package moves is the private service by which movers have the driver of their node do its part when a volume moves to another
// node: its messages and its client. It is beside CSI on the driver's socket, which only root can connect to. The driver serves
// it; what its calls do is in pkg/pool. Messages are JSON objects in google.protobuf.Struct.
package moves

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Service is the name of the service.
const Service = "hostpath.Moves"

// The calls. What they do is in pkg/pool.
const (
	State         = "MoveState"
	Reference     = "MoveReference"
	Fence         = "MoveFence"
	Unfence       = "MoveUnfence"
	HandOver      = "MoveHandOver"
	RemoveSource  = "MoveRemoveSource"
	PrepareTarget = "MovePrepareTarget"
	Based         = "MoveBased"
	Received      = "MoveReceived"
	ConfirmTarget = "MoveConfirmTarget"
	AbortTarget   = "MoveAbortTarget"
)

// A Request is that of each call. Fields that a call does not need are ignored.
type Request struct {
	// Volume is the volume id.
	Volume string `json:"volume"`
	// Move is the uid of the move, and Peer the other node.
	Move string `json:"move,omitempty"`
	Peer string `json:"peer,omitempty"`
	// Fence is what the source drew when it was fenced.
	Fence string `json:"fence,omitempty"`
	// Reference is the token of the one that Reference makes, and Base that of the one which it keeps, or which the copy equals.
	Reference string `json:"reference,omitempty"`
	Base      string `json:"base,omitempty"`
	// Was is the base that Based takes the place of, and what it has recorded of the session whose copy is Received.
	Was string `json:"was,omitempty"`
	// Verify is the way in which the copy was compared with Base.
	Verify string `json:"verify,omitempty"`
	// LeaveSnapshots has Fence leave the snapshots of the volume behind.
	LeaveSnapshots bool `json:"leaveSnapshots,omitempty"`
	// TargetAborted tells Unfence that the copy on the other node is gone.
	TargetAborted bool `json:"targetAborted,omitempty"`
	// EvenConfirmed tells AbortTarget that no pod has used the copy, and that the source has all of it still.
	EvenConfirmed bool `json:"evenConfirmed,omitempty"`
	// Pool is that of the copy that PrepareTarget makes, and Shape what it has like its source. Fence takes from it the size of
	// a volume without a record.
	Pool string `json:"pool,omitempty"`
	Shape
}

// A Shape is what both sides have alike. Numbers are strings: those of JSON lose digits above 2^53.
type Shape struct {
	Mode          string `json:"mode,omitempty"`
	Bytes         int64  `json:"bytes,omitempty,string"`
	BlockBytes    int64  `json:"blockBytes,omitempty,string"`
	BytesPerInode int64  `json:"bytesPerInode,omitempty,string"`
}

// A Volume is the answer of State, Fence and PrepareTarget.
type Volume struct {
	Pool string `json:"pool"`
	Shape
	// UID is that of the record: another copy of the same name has another.
	UID string `json:"uid,omitempty"`
	// Recorded says that the volume has a record.
	Recorded bool `json:"recorded"`
	// Used says that the node has the volume published.
	Used bool `json:"used"`
	// Move, Role (source or target), Peer, Fence and HandedOver are those of the record; empty for a volume that does not move.
	Move       string `json:"move,omitempty"`
	Role       string `json:"role,omitempty"`
	Peer       string `json:"peer,omitempty"`
	Fence      string `json:"fence,omitempty"`
	HandedOver bool   `json:"handedOver,omitempty"`
	// Base is the reference that a target equals, and Verify the way in which the two were compared.
	Base   string `json:"base,omitempty"`
	Verify string `json:"verify,omitempty"`
	// Moved is the last move that was confirmed here, and Undone the last that was undone.
	Moved  string `json:"moved,omitempty"`
	Undone string `json:"undone,omitempty"`
}

// Describe is what gRPC needs to serve the service by a function that takes the calls.
func Describe(call func(ctx context.Context, name string, r Request) (*Volume, error)) *grpc.ServiceDesc {
	d := &grpc.ServiceDesc{ServiceName: Service, HandlerType: (*any)(nil), Metadata: "moves"}
	for _, name := range []string{State, Reference, Fence, Unfence, HandOver, RemoveSource, PrepareTarget, Based, Received, ConfirmTarget, AbortTarget} {
		handle := func(ctx context.Context, message any) (any, error) {
			var r Request
			if err := decode(message.(*structpb.Struct), &r); err != nil {
				return nil, err
			}
			v, err := call(ctx, name, r)
			if err != nil {
				return nil, err
			}
			return encode(v)
		}
		d.Methods = append(d.Methods, grpc.MethodDesc{
			MethodName: name,
			Handler: func(_ any, ctx context.Context, read func(any) error, around grpc.UnaryServerInterceptor) (any, error) {
				message := new(structpb.Struct)
				if err := read(message); err != nil {
					return nil, err
				}
				if around == nil {
					return handle(ctx, message)
				}
				return around(ctx, message, &grpc.UnaryServerInfo{FullMethod: path(name)}, handle)
			},
		})
	}
	return d
}

func path(name string) string { return "/" + Service + "/" + name }

// encode makes a message of a value; an empty one of nil.
func encode(v any) (*structpb.Struct, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	fields := make(map[string]any)
	if err := json.Unmarshal(data, &fields); err != nil {
		return nil, err
	}
	return structpb.NewStruct(fields)
}

func decode(message *structpb.Struct, v any) error {
	data, err := json.Marshal(message.AsMap())
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("%w: the message: %w", volume.ErrInvalid, err)
	}
	return nil
}

// A Client calls the driver of this node.
type Client struct{ connection *grpc.ClientConn }

// soon is how a client connects again to a driver that was away: while a volume is fenced its pods wait. By default gRPC waits up to two
// minutes.
var soon = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: again / 4, Multiplier: 1.5, MaxDelay: time.Second},
	MinConnectTimeout: 20 * time.Second,
}

// Dial is a client of the driver at a socket, by its absolute path. It connects when it is first needed.
func Dial(socket string) (*Client, error) {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(soon))
	if err != nil {
		return nil, err
	}
	return &Client{connection}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.connection.Close() }

// IsNotFound reports whether the driver has answered that it has no such volume.
func IsNotFound(err error) bool { return status.Code(err) == codes.NotFound }

// IsUnknown reports whether the driver does not know a call.
func IsUnknown(err error) bool { return status.Code(err) == codes.Unimplemented }

// unknown says of a driver that does not know a call which one it is.
func (c *Client) unknown(ctx context.Context, err error) error {
	is, infoErr := csi.NewIdentityClient(c.connection).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if infoErr != nil {
		return errors.Join(err, infoErr)
	}
	return fmt.Errorf("the driver of this node has version %s, which cannot move volumes this way: update it: %w", is.GetVendorVersion(), err)
}

// again is how long Repeat waits before it makes a call again.
const again = 200 * time.Millisecond

// Repeat is Call that is made again as long as another call works on the volume, the driver or its pool is away, or the driver has
// answered before it had done its work, as it does after its time for a call: drivers restart, disks are slow, and every call can be
// repeated. It ends with ctx.
func (c *Client) Repeat(ctx context.Context, name string, r Request) (Volume, error) {
	for {
		v, err := c.Call(ctx, name, r)
		switch status.Code(err) {
		case codes.Aborted, codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		default:
			return v, err
		}
		select {
		case <-ctx.Done():
			return v, err
		case <-time.After(again):
		}
	}
}

// Call makes one call. Its errors have the codes of gRPC.
func (c *Client) Call(ctx context.Context, name string, r Request) (Volume, error) {
	message, err := encode(r)
	if err != nil {
		return Volume{}, err
	}
	var v Volume
	answer := new(structpb.Struct)
	if err := c.connection.Invoke(ctx, path(name), message, answer); IsUnknown(err) {
		return Volume{}, c.unknown(ctx, err)
	} else if err != nil {
		return Volume{}, err
	}
	return v, decode(answer, &v)
}
