package driver_test

import (
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestGetCapacity(t *testing.T) {
	h := newHarness(t, setup{pools: `[{"name":"local","path":"local"},{"name":"everywhere","path":"everywhere","shared":true},` +
		`{"name":"away","path":"away","requireMount":true},{"name":"reserved","path":"reserved","reserve":"100%"}]`})
	in := func(pool string) map[string]string { return map[string]string{"storagePool": pool} }
	several := capability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)
	for name, c := range map[string]struct {
		request *csi.GetCapacityRequest
		some    bool
	}{
		"a pool has some, asked as external-provisioner does": {&csi.GetCapacityRequest{Parameters: in("local"), AccessibleTopology: onNode(nodeName)}, true},
		"the parameters are enough":                           {&csi.GetCapacityRequest{Parameters: in("local")}, true},
		"another node has none":                               {&csi.GetCapacityRequest{Parameters: in("local"), AccessibleTopology: onNode("node-b")}, false},
		"a topology that is not ours has none":                {&csi.GetCapacityRequest{Parameters: in("local"), AccessibleTopology: &csi.Topology{Segments: map[string]string{"zone": "z"}}}, false},
		"a shared pool has some for another node":             {&csi.GetCapacityRequest{Parameters: in("everywhere"), AccessibleTopology: onNode("node-b")}, true},
		"directories have some":                               {&csi.GetCapacityRequest{Parameters: in("local"), VolumeCapabilities: []*csi.VolumeCapability{writer()}}, true},
		"block devices have some":                             {&csi.GetCapacityRequest{Parameters: in("local"), VolumeCapabilities: []*csi.VolumeCapability{block()}}, true},
		"an unknown mount flag has none":                      {&csi.GetCapacityRequest{Parameters: in("local"), VolumeCapabilities: []*csi.VolumeCapability{writer("discard")}}, false},
		"several nodes have none":                             {&csi.GetCapacityRequest{Parameters: in("local"), VolumeCapabilities: []*csi.VolumeCapability{several}}, false},
		"several nodes have some of a shared pool":            {&csi.GetCapacityRequest{Parameters: in("everywhere"), VolumeCapabilities: []*csi.VolumeCapability{several}}, true},
		"a pool that is missing has none":                     {&csi.GetCapacityRequest{Parameters: in("away"), AccessibleTopology: onNode(nodeName)}, false},
		"a pool that is reserved has none":                    {&csi.GetCapacityRequest{Parameters: in("reserved")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			response := must.Value(h.GetCapacity(t.Context(), c.request))(t)
			if got := response.GetAvailableCapacity(); got > 0 != c.some || got < 0 || got >= tooMuch {
				t.Errorf("available are %d bytes, want some: %v", got, c.some)
			}
			if name == "a pool that is missing has none" {
				if response.GetMaximumVolumeSize() != nil {
					t.Error("a pool that does not serve looks like one that is full")
				}
				return
			}
			if response.GetMaximumVolumeSize() == nil {
				t.Fatal("the largest volume is not reported")
			}
			wantEqual(t, "the largest volume", response.GetMaximumVolumeSize().GetValue(), response.GetAvailableCapacity())
		})
	}
}

// The scheduler has no words for parameters that no pool is chosen by. So it is led to
// have CreateVolume called, which has.
func TestGetCapacityWithBadParameters(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	for name, c := range map[string]struct {
		parameters map[string]string
		says       []string
	}{
		"an unknown pool":            {map[string]string{"storagePool": "nowhere"}, []string{`"nowhere"`, `"local"`, `"other"`}},
		"the pool's key misspelled":  {map[string]string{"storagepool": "local"}, []string{`"storagepool"`, `"storagePool"`}},
		"no pool among several":      {nil, []string{`"local"`, `"other"`}},
		"a pool name that cannot be": {map[string]string{"storagePool": "a/b"}, []string{`"a/b"`}},
	} {
		t.Run(name, func(t *testing.T) {
			for topology, largest := range map[*csi.Topology]int64{nil: volume.MaxBytes, onNode(nodeName): volume.MaxBytes, onNode("node-b"): 0} {
				response, err := h.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: c.parameters, AccessibleTopology: topology})
				must.Succeed(t, err)
				wantEqual(t, "what is available", response.GetAvailableCapacity(), int64(0))
				wantEqual(t, "the largest volume", response.GetMaximumVolumeSize().GetValue(), largest)
			}
			_, err := h.CreateVolume(t.Context(), createRequest("vol", func(req *csi.CreateVolumeRequest) { req.Parameters = c.parameters }))
			wantCode(t, err, codes.InvalidArgument, c.says...)
			// As external-provisioner asks before a node takes a claim with immediate binding.
			_, err = h.GetCapacity(t.Context(), &csi.GetCapacityRequest{
				Parameters: c.parameters, AccessibleTopology: onNode(nodeName), VolumeCapabilities: []*csi.VolumeCapability{writer()},
			})
			wantCode(t, err, codes.InvalidArgument, c.says...)
		})
	}
}

func TestVolumeInTwoPools(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	h.create(t, "vol", "local")
	must.Succeed(t, os.Mkdir(h.path("other", "vol"), 0o755))
	// The context says which is meant.
	_, err := h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("vol"), func(req *csi.NodePublishVolumeRequest) {
		req.VolumeContext = map[string]string{"storagePool": "other"}
	}))
	must.Succeed(t, err)
	wantEqual(t, "where it is published", h.mounts.published(t, h.path("other", ""), "vol"), []string{h.target("vol")})
	_, err = h.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	wantCode(t, err, codes.Internal, "vol", `"local"`, `"other"`)
	_, err = h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("vol")))
	wantCode(t, err, codes.Internal, "vol", `"local"`, `"other"`)
	wantThere(t, h.path("local", "vol"))
	wantThere(t, h.path("other", "vol"))
	// A pod must be able to end all the same.
	h.unpublish(t, "vol", h.target("vol"))
}

func TestMissingPool(t *testing.T) {
	h := newHarness(t, setup{pools: missingPool})
	_, err := h.CreateVolume(t.Context(), createRequest("vol", inPool("away")))
	wantCode(t, err, codes.ResourceExhausted, `"away"`, "requireMount")
	// A volume that is not seen may be in the pool that is not seen.
	for name, call := range map[string]func(t *testing.T) error{
		"a volume is not reported as absent": func(t *testing.T) error {
			return must.Err(h.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: "unseen"}))
		},
		"a volume is not validated": func(t *testing.T) error {
			return must.Err(h.ValidateVolumeCapabilities(t.Context(), validateRequest("unseen", writer())))
		},
		"a volume is not measured": func(t *testing.T) error {
			return must.Err(h.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "unseen", VolumePath: h.target("unseen")}))
		},
	} {
		t.Run(name, func(t *testing.T) { wantCode(t, call(t), codes.Unavailable, `"away"`, "requireMount") })
	}
	t.Run("a pod can end", func(t *testing.T) { h.unpublish(t, "unseen", h.target("unseen")) })
	t.Run("the driver is ready", func(t *testing.T) {
		probe := must.Value(h.Probe(t.Context(), &csi.ProbeRequest{}))(t)
		wantEqual(t, "ready", probe.GetReady().GetValue(), true)
	})
}
