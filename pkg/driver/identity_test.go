package driver_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestPluginInfo(t *testing.T) {
	h := newHarness(t, setup{config: driver.Config{Name: driver.DefaultName, Version: "v1.2.3"}})
	response := must.Value(h.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{}))(t)
	wantEqual(t, "the plugin", response, &csi.GetPluginInfoResponse{Name: "kubevirt.io.hostpath-provisioner", VendorVersion: "v1.2.3"})
}

func TestDriverName(t *testing.T) {
	for name, good := range map[string]bool{
		driver.DefaultName: true, "a": true, "A-1.b": true, strings.Repeat("a", 63): true,
		"": false, ".a": false, "a-": false, "a/b": false, "a b": false, "a_b": false, "a\n": false, strings.Repeat("a", 64): false,
	} {
		err := driver.CheckName(name)
		if (err == nil) != good {
			t.Errorf("of %q it says %v, want it good: %v", name, err, good)
		}
		if err != nil {
			wantContains(t, err.Error(), driver.DefaultName)
		}
	}
}

func TestCapabilities(t *testing.T) {
	h := newHarness(t, setup{})
	plugin := must.Value(h.GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{}))(t)
	controller := must.Value(h.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{}))(t)
	node := must.Value(h.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{}))(t)
	var ofPlugin, ofController, ofNode []string
	for _, c := range plugin.GetCapabilities() {
		if expansion := c.GetVolumeExpansion(); expansion != nil {
			ofPlugin = append(ofPlugin, expansion.GetType().String())
			continue
		}
		ofPlugin = append(ofPlugin, c.GetService().GetType().String())
	}
	for _, c := range controller.GetCapabilities() {
		ofController = append(ofController, c.GetRpc().GetType().String())
	}
	for _, c := range node.GetCapabilities() {
		ofNode = append(ofNode, c.GetRpc().GetType().String())
	}
	for of, c := range map[string]struct {
		got  []string
		want string
	}{
		"plugin": {ofPlugin, "CONTROLLER_SERVICE ONLINE SNAPSHOT_ACCESSIBILITY_CONSTRAINTS VOLUME_ACCESSIBILITY_CONSTRAINTS"},
		// 11 and 4 are VOLUME_CONDITION of v1.12.
		"controller": {ofController, "11 CLONE_VOLUME CREATE_DELETE_SNAPSHOT CREATE_DELETE_VOLUME GET_CAPACITY GET_SNAPSHOT GET_VOLUME " +
			"GET_VOLUME_HEALTH LIST_SNAPSHOTS LIST_VOLUMES LIST_VOLUME_HEALTH SINGLE_NODE_MULTI_WRITER"},
		"node": {ofNode, "4 EXPAND_VOLUME GET_STORAGE_HEALTH GET_VOLUME_HEALTH GET_VOLUME_STATS SINGLE_NODE_MULTI_WRITER"},
	} {
		slices.Sort(c.got)
		wantEqual(t, "the capabilities of the "+of, strings.Join(c.got, " "), c.want)
	}
}

func TestProbeIsReadyAfterFirstCheck(t *testing.T) {
	hang := make(chan struct{})
	h := newHarness(t, setup{
		unlooked: true,
		hooks:    hooks{sameFilesystem: func() { <-hang }},
		options: func(o *pool.Options) {
			o.SystemPath, o.HangAfter = "/", time.Hour
		},
	})
	ready := func() bool {
		t.Helper()
		response := must.Value(h.Probe(t.Context(), &csi.ProbeRequest{}))(t)
		return response.GetReady().GetValue()
	}
	wantEqual(t, "ready before", ready(), false)
	wantCode(t, must.Err(h.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{})), codes.Unavailable)
	wantCode(t, must.Err(h.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})), codes.Unavailable)
	close(hang)
	must.Succeed(t, h.set.Wait(t.Context()))
	wantEqual(t, "ready after", ready(), true)
}

func TestProbeIsReadyWhilePoolHangs(t *testing.T) {
	hangs, hang := make(chan struct{}, 1), make(chan struct{})
	h := newHarness(t, setup{
		hooks: hooks{sameFilesystem: func() {
			select {
			case hangs <- struct{}{}:
			default: // a later check
			}
			<-hang
		}},
		options: func(o *pool.Options) {
			o.SystemPath, o.HangAfter, o.RetryEvery = "/", time.Millisecond, time.Millisecond
		},
	})
	defer close(hang)
	<-hangs
	response := must.Value(h.Probe(t.Context(), &csi.ProbeRequest{}))(t)
	wantEqual(t, "ready", response.GetReady().GetValue(), true)
}
