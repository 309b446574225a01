package load

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// wrongs are calls that can never succeed.
var wrongs = []struct {
	what string
	call func(*client, context.Context) error
	code codes.Code
}{
	{"create without a name", creating(drivertest.Volume{Pool: "xfs", Bytes: unit}), codes.InvalidArgument},
	{"create outside", creating(drivertest.Volume{ID: "../outside", Pool: "xfs", Bytes: unit}), codes.InvalidArgument},
	{"create in a pool that is not there", creating(drivertest.Volume{ID: "wrong", Pool: "nowhere", Bytes: unit}), codes.InvalidArgument},
	{"create in no pool", creating(drivertest.Volume{ID: "wrong", Bytes: unit}), codes.InvalidArgument},
	{"create less than nothing", creating(drivertest.Volume{ID: "wrong", Pool: "xfs", Bytes: -1}), codes.InvalidArgument},
	{"create more than a pool has", creating(drivertest.Volume{ID: "wrong", Pool: "ext4", Bytes: 1 << 45}), codes.ResourceExhausted},
	{"create more than there can be", creating(drivertest.Volume{ID: "wrong", Pool: "btrfs", Bytes: 1 << 60}), codes.OutOfRange},
	{"create from a snapshot", func(c *client, ctx context.Context) error {
		v := drivertest.Volume{ID: "wrong", Pool: "xfs"}
		_, err := c.Controller().CreateVolume(ctx, &csi.CreateVolumeRequest{
			Name: v.ID, Parameters: v.Parameters(), VolumeCapabilities: []*csi.VolumeCapability{v.Capability()},
			VolumeContentSource: &csi.VolumeContentSource{},
		})
		return err
	}, codes.InvalidArgument},
	{"delete nothing", func(c *client, ctx context.Context) error { return c.Delete(ctx, "") }, codes.InvalidArgument},
	{"delete what is the driver's own", func(c *client, ctx context.Context) error { return c.Delete(ctx, ".hostpath-provisioner") }, codes.InvalidArgument},
	{"get what is no id", func(c *client, ctx context.Context) error { _, err := c.Get(ctx, "a/b"); return err }, codes.InvalidArgument},
	{"list after nothing", func(c *client, ctx context.Context) error {
		_, err := c.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{StartingToken: "nothing"})
		return err
	}, codes.Aborted},
	{"list less than nothing", func(c *client, ctx context.Context) error {
		_, err := c.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: -1})
		return err
	}, codes.InvalidArgument},
	{"capacity of nowhere for a volume", func(c *client, ctx context.Context) error {
		v := drivertest.Volume{Pool: "nowhere"}
		_, err := c.Controller().GetCapacity(ctx, &csi.GetCapacityRequest{
			Parameters: v.Parameters(), VolumeCapabilities: []*csi.VolumeCapability{v.Capability()},
		})
		return err
	}, codes.InvalidArgument},
	{"publish at no path", func(c *client, ctx context.Context) error {
		v := drivertest.Volume{ID: "wrong"}
		_, err := c.Kubelet().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: v.ID, VolumeCapability: v.Capability()})
		return err
	}, codes.InvalidArgument},
	{"publish as nothing", func(c *client, ctx context.Context) error {
		_, err := c.Kubelet().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: "wrong", TargetPath: c.Target("wrong")})
		return err
	}, codes.InvalidArgument},
	{"unpublish from a relative path", func(c *client, ctx context.Context) error {
		_, err := c.Kubelet().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: "wrong", TargetPath: "relative"})
		return err
	}, codes.InvalidArgument},
	{"stats of nothing", func(c *client, ctx context.Context) error { _, err := c.Stats(ctx, "nothing", "wrong"); return err }, codes.NotFound},
	{"expand nothing", func(c *client, ctx context.Context) error {
		_, err := c.Expand(ctx, drivertest.Volume{ID: "nothing", Bytes: unit}, "wrong")
		return err
	}, codes.NotFound},
	{"expand by the controller", func(c *client, ctx context.Context) error {
		_, err := c.Controller().ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: "wrong"})
		return err
	}, codes.Unimplemented},
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
	if w.code == codes.Aborted {
		return want(w.what, w.call(c, ctx), w.code)
	}
	return want(w.what, drivertest.Repeat(ctx, func() error { return w.call(c, ctx) }), w.code)
}
