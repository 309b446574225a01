package driver_test

import (
	"os"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
)

// One driver answers clients of CSI v1.12, such as the health monitor v0.18, and clients of v1.13, such as
// kubelet 1.37, each in what it knows. Neither is disturbed by what the driver has for the other.
func TestClientsOfBothVersions(t *testing.T) {
	h := newHarness(t, setup{})
	h.create(t, "pvc-1", "")
	h.publish(t, "pvc-1", h.target("pvc-1"))
	wantOld := func(want *oldcsi.VolumeCondition) {
		t.Helper()
		for method, got := range h.oldConditions(t, "pvc-1") {
			wantEqual(t, method+" of v1.12", got, want)
		}
	}
	wantNew := func(want string) {
		t.Helper()
		wantEqual(t, "NodeGetVolumeHealth of v1.13", entries(h.nodeHealth(t, "pvc-1", h.target("pvc-1"))), want)
		got := must.Value(h.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: "pvc-1"}))(t)
		wantEqual(t, "ControllerGetVolumeHealth of v1.13", entries(got.GetVolumeHealth()), want)
	}
	for service, method := range map[string]string{"Controller": "ControllerGetCapabilities", "Node": "NodeGetCapabilities"} {
		response := must.Value(oldcsi.Call(t.Context(), h.connection, service, method, ""))(t)
		if got := oldcsi.Capabilities(response); !slices.Contains(got, "VOLUME_CONDITION") {
			t.Errorf("to a client of v1.12 %s says %q", method, got)
		}
	}
	wantOld(&oldcsi.VolumeCondition{Message: h.conditions(t, "pvc-1")["ListVolumes"].GetMessage()})
	wantNew("")
	must.Succeed(t, os.Rename(h.path("local", "pvc-1"), h.path("local", ".aside")))
	wantOld(&oldcsi.VolumeCondition{Abnormal: true, Message: h.conditions(t, "pvc-1")["ListVolumes"].GetMessage()})
	wantNew("DATA_LOSS DirectoryMissing")
}

// oldConditions are what the calls of v1.12 say of a published volume.
func (h *harness) oldConditions(t *testing.T, id string) map[string]*oldcsi.VolumeCondition {
	t.Helper()
	call := func(service, method, request string) proto.Message {
		return must.Value(oldcsi.Call(t.Context(), h.connection, service, method, request))(t)
	}
	listed, of := make(map[string]*oldcsi.VolumeCondition), `volume_id: "`+id+`"`
	must.Value(oldcsi.List(t.Context(), h.connection, "", listed))(t)
	return map[string]*oldcsi.VolumeCondition{
		"ListVolumes":         listed[id],
		"ControllerGetVolume": oldcsi.Condition(oldcsi.Status(call("Controller", "ControllerGetVolume", of))),
		"NodeGetVolumeStats":  oldcsi.Condition(call("Node", "NodeGetVolumeStats", of+` volume_path: "`+h.target(id)+`"`)),
	}
}
