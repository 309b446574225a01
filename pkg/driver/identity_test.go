package driver_test

import (
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestPluginInfo(t *testing.T) {
	r := newRig(t, setup{config: driver.Config{Name: driver.DefaultName, Version: "v1.2.3"}})
	response, err := r.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	must.Succeed(t, err)
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

func TestPluginCapabilities(t *testing.T) {
	r := newRig(t, setup{})
	response, err := r.GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
	must.Succeed(t, err)
	got := make(map[string]int)
	for _, c := range response.GetCapabilities() {
		if expansion := c.GetVolumeExpansion(); expansion != nil {
			got[expansion.GetType().String()]++
			continue
		}
		got[c.GetService().GetType().String()]++
	}
	wantEqual(t, "the capabilities", got, map[string]int{"CONTROLLER_SERVICE": 1, "VOLUME_ACCESSIBILITY_CONSTRAINTS": 1, "SNAPSHOT_ACCESSIBILITY_CONSTRAINTS": 1, "ONLINE": 1})
}

func TestProbeIsReadyAfterFirstCheck(t *testing.T) {
	hang := make(chan struct{})
	r := newRig(t, setup{
		unlooked: true,
		hooks:    hooks{sameFilesystem: func() { <-hang }},
		options: func(o *pool.Options) {
			o.SystemPath, o.HangAfter = "/", time.Hour
		},
	})
	ready := func() bool {
		t.Helper()
		response, err := r.Probe(t.Context(), &csi.ProbeRequest{})
		must.Succeed(t, err)
		return response.GetReady().GetValue()
	}
	wantEqual(t, "ready before", ready(), false)
	close(hang)
	must.Succeed(t, r.set.Wait(t.Context()))
	wantEqual(t, "ready after", ready(), true)
}

func TestProbeIsReadyWhilePoolHangs(t *testing.T) {
	hangs, hang := make(chan struct{}, 1), make(chan struct{})
	r := newRig(t, setup{
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
	response, err := r.Probe(t.Context(), &csi.ProbeRequest{})
	must.Succeed(t, err)
	wantEqual(t, "ready", response.GetReady().GetValue(), true)
}
