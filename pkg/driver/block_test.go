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
func (h *harness) createBlock(t *testing.T, name string) *csi.Volume {
	t.Helper()
	response, err := h.CreateVolume(t.Context(), createRequest(name, func(req *csi.CreateVolumeRequest) {
		req.VolumeCapabilities = []*csi.VolumeCapability{block()}
	}))
	must.Succeed(t, err)
	return response.GetVolume()
}

func asBlock(req *csi.NodePublishVolumeRequest) { req.VolumeCapability = block() }

func (h *harness) attached(t *testing.T, want int) []loop.Device {
	t.Helper()
	devices := must.Value(h.loops.Attached())(t)
	if len(devices) != want {
		t.Fatalf("devices %+v, want %d", devices, want)
	}
	return devices
}

// A publication attaches the device before it mounts it: meanwhile it looks unused.
func TestUnpublishKeepsDeviceOfPublicationUnderWay(t *testing.T) {
	held := newGate("held")
	unmounted := make(chan struct{}, 8)
	h := newHarness(t, setup{hooks: hooks{publish: held.publish, unpublished: func(bind.Target) { unmounted <- struct{}{} }}})
	h.createBlock(t, "vol")
	must.Succeed(t, must.Err(h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("ending"), asBlock))))
	first := later(func() error {
		return must.Err(h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("held"), asBlock)))
	})
	<-held.entered
	second := later(func() error {
		return must.Err(h.NodeUnpublishVolume(t.Context(), unpublishRequest("vol", h.target("ending"))))
	})
	select {
	case <-unmounted:
	case err := <-second:
		t.Fatalf("unpublish at another target: %v", err)
	}
	h.attached(t, 1)
	close(held.open)
	must.Succeed(t, <-first)
	must.Succeed(t, <-second)
	h.attached(t, 1)
	h.unpublish(t, "vol", h.target("held"))
	h.attached(t, 0)
}

func TestBlockVolumeWithoutDeviceNodes(t *testing.T) {
	h := newHarness(t, setup{})
	h.createBlock(t, "source")
	made := must.Value(h.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "source"}))(t)
	h.loops.Nodes = loop.ErrNodes
	for name, source := range map[string]*csi.VolumeContentSource{
		"new":     nil,
		"clone":   {Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: "source"}}},
		"restore": {Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: made.GetSnapshot().GetSnapshotId()}}},
	} {
		_, err := h.CreateVolume(t.Context(), createRequest(name, func(req *csi.CreateVolumeRequest) {
			req.VolumeCapabilities = []*csi.VolumeCapability{block()}
			req.VolumeContentSource = source
		}))
		wantCode(t, err, codes.ResourceExhausted, loop.ErrNodes.Error())
	}
	wantEqual(t, "the volumes", h.ids(t), []string{"source"})
	h.create(t, "directory", "")
}

func TestNoLoopDevicesIsResourceExhausted(t *testing.T) {
	h := newHarness(t, setup{})
	h.loops.Max = 1
	for _, name := range []string{"one", "two"} {
		h.createBlock(t, name)
	}
	_, err := h.NodePublishVolume(t.Context(), publishRequest("one", h.target("one"), asBlock))
	must.Succeed(t, err)
	_, err = h.NodePublishVolume(t.Context(), publishRequest("two", h.target("two"), asBlock))
	wantCode(t, err, codes.ResourceExhausted, "two")
	if _, err := os.Lstat(h.target("two")); err == nil {
		t.Error("the target of the refused call is there")
	}
}
