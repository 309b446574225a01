package load

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// wrongs are calls that can never succeed, one of each way to fail: none may leave anything in memory.
var wrongs = []struct {
	what string
	call func(*client, context.Context) error
	code codes.Code
}{
	{"create outside", creating(drivertest.Volume{ID: "../outside", Pool: "xfs", Bytes: unit}), codes.InvalidArgument},
	{"create in a pool that is not there", creating(drivertest.Volume{ID: "wrong", Pool: "nowhere", Bytes: unit}), codes.InvalidArgument},
	{"create more than a pool has", creating(drivertest.Volume{ID: "wrong", Pool: "ext4", Bytes: 1 << 45}), codes.ResourceExhausted},
	{"create more than there can be", creating(drivertest.Volume{ID: "wrong", Pool: "btrfs", Bytes: 1 << 60}), codes.OutOfRange},
	{"delete what is the driver's own", func(c *client, ctx context.Context) error { return c.Delete(ctx, ".hostpath-provisioner") }, codes.InvalidArgument},
	{"expand nothing", func(c *client, ctx context.Context) error {
		_, err := c.Expand(ctx, drivertest.Volume{ID: "nothing", Bytes: unit}, "wrong")
		return err
	}, codes.NotFound},
	{"make a snapshot of nothing", func(c *client, ctx context.Context) error {
		_, err := c.Controller().CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "wrong", SourceVolumeId: "nothing"})
		return err
	}, codes.NotFound},
	{"stage", func(c *client, ctx context.Context) error {
		_, err := c.Kubelet().NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: "wrong"})
		return err
	}, codes.Unimplemented},
}

func creating(v drivertest.Volume) func(*client, context.Context) error {
	return func(c *client, ctx context.Context) error { _, err := c.Create(ctx, v); return err }
}

// wrong makes a call that cannot succeed. Calls that other clients make on the same names
// may be in its way, where a lock comes before what is wrong.
func (c *client) wrong(ctx context.Context) error {
	w := wrongs[c.random.IntN(len(wrongs))]
	return want(w.what, drivertest.Repeat(ctx, func() error { return w.call(c, ctx) }), w.code)
}
