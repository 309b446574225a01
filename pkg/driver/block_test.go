package driver_test

import (
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// createBlock makes a block volume of 4 MiB.
func (r *rig) createBlock(t *testing.T, name string) *csi.Volume {
	t.Helper()
	response, err := r.CreateVolume(t.Context(), createRequest(name, func(req *csi.CreateVolumeRequest) {
		req.VolumeCapabilities = []*csi.VolumeCapability{block()}
	}))
	must.Succeed(t, err)
	return response.GetVolume()
}

func asBlock(req *csi.NodePublishVolumeRequest) { req.VolumeCapability = block() }

func (r *rig) attached(t *testing.T, want int) []loop.Device {
	t.Helper()
	devices, err := r.loops.Attached()
	must.Succeed(t, err)
	if len(devices) != want {
		t.Fatalf("devices %+v, want %d", devices, want)
	}
	return devices
}

// A publication attaches the device before it mounts it: meanwhile it looks unused.
func TestUnpublishKeepsDeviceOfPublicationUnderWay(t *testing.T) {
	held := newGate("held")
	unmounted := make(chan struct{}, 8)
	r := newRig(t, setup{hooks: hooks{publish: held.publish, unpublished: func(bind.Target) { unmounted <- struct{}{} }}})
	r.createBlock(t, "vol")
	_, err := r.NodePublishVolume(t.Context(), publishRequest("vol", r.target("ending"), asBlock))
	must.Succeed(t, err)
	first := later(func() error {
		_, err := r.NodePublishVolume(t.Context(), publishRequest("vol", r.target("held"), asBlock))
		return err
	})
	<-held.entered
	second := later(func() error {
		_, err := r.NodeUnpublishVolume(t.Context(), unpublishRequest("vol", r.target("ending")))
		return err
	})
	select {
	case <-unmounted:
	case err := <-second:
		t.Fatalf("unpublish at another target: %v", err)
	}
	r.attached(t, 1)
	close(held.open)
	must.Succeed(t, <-first)
	must.Succeed(t, <-second)
	r.attached(t, 1)
	r.unpublish(t, "vol", r.target("held"))
	r.attached(t, 0)
}

func TestBlockVolumeWithoutDeviceNodes(t *testing.T) {
	r := newRig(t, setup{})
	r.createBlock(t, "source")
	made, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "source"})
	must.Succeed(t, err)
	r.loops.Nodes = loop.ErrNodes
	for name, source := range map[string]*csi.VolumeContentSource{
		"new":     nil,
		"clone":   {Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: "source"}}},
		"restore": {Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: made.GetSnapshot().GetSnapshotId()}}},
	} {
		_, err := r.CreateVolume(t.Context(), createRequest(name, func(req *csi.CreateVolumeRequest) {
			req.VolumeCapabilities = []*csi.VolumeCapability{block()}
			req.VolumeContentSource = source
		}))
		wantCode(t, err, codes.ResourceExhausted, loop.ErrNodes.Error())
	}
	wantEqual(t, "the volumes", r.ids(t), []string{"source"})
	r.create(t, "directory", "")
}

func TestNoLoopDevicesIsResourceExhausted(t *testing.T) {
	r := newRig(t, setup{})
	r.loops.Max = 1
	for _, name := range []string{"one", "two"} {
		r.createBlock(t, name)
	}
	_, err := r.NodePublishVolume(t.Context(), publishRequest("one", r.target("one"), asBlock))
	must.Succeed(t, err)
	_, err = r.NodePublishVolume(t.Context(), publishRequest("two", r.target("two"), asBlock))
	wantCode(t, err, codes.ResourceExhausted, "two")
	if _, err := os.Lstat(r.target("two")); err == nil {
		t.Error("the target of the refused call is there")
	}
}
