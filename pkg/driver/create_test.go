package driver_test

import (
	"math"
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestCreateVolumeResponse(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	wantEqual(t, "the volume", h.create(t, "vol", "local"), &csi.Volume{
		VolumeId:           "vol",
		CapacityBytes:      4 * mib,
		AccessibleTopology: []*csi.Topology{onNode(nodeName)},
		VolumeContext:      map[string]string{"storagePool": "local", "sizeEnforced": "false"},
	})
	info := must.Value(os.Stat(h.path("local", "vol")))(t)
	wantEqual(t, "the mode of its directory", info.Mode(), os.ModeDir|0o777)

	wantEqual(t, "the volume of a shared pool", h.create(t, "shared-vol", "everywhere"), &csi.Volume{
		VolumeId:      "shared-vol",
		CapacityBytes: 4 * mib,
		VolumeContext: map[string]string{"storagePool": "everywhere", "sizeEnforced": "false"},
	})
}

func TestCreateVolumeInvalidRequests(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	withCapabilities := func(all ...*csi.VolumeCapability) func(*csi.CreateVolumeRequest) {
		return func(req *csi.CreateVolumeRequest) { req.VolumeCapabilities = all }
	}
	withMode := func(mode csi.VolumeCapability_AccessMode_Mode) func(*csi.CreateVolumeRequest) {
		return withCapabilities(capability(mode))
	}
	withParameter := func(key, value string) func(*csi.CreateVolumeRequest) {
		return func(req *csi.CreateVolumeRequest) { req.Parameters = map[string]string{key: value} }
	}
	withSize := func(required, limit int64) func(*csi.CreateVolumeRequest) {
		return func(req *csi.CreateVolumeRequest) {
			req.CapacityRange = &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}
		}
	}
	for name, c := range map[string]struct {
		change func(*csi.CreateVolumeRequest)
		code   codes.Code
		says   []string
	}{
		"no capability":                      {withCapabilities(), codes.InvalidArgument, []string{"capabilities are missing"}},
		"a capability that is nothing":       {withCapabilities(nil), codes.InvalidArgument, []string{"capability"}},
		"a capability of no type":            {withCapabilities(&csi.VolumeCapability{AccessMode: writer().GetAccessMode()}), codes.InvalidArgument, []string{"access type"}},
		"a block device besides":             {withCapabilities(writer(), block()), codes.InvalidArgument, []string{"block"}},
		"no access mode":                     {withCapabilities(&csi.VolumeCapability{AccessType: writer().GetAccessType()}), codes.InvalidArgument, []string{"access mode"}},
		"an unknown access mode":             {withMode(csi.VolumeCapability_AccessMode_UNKNOWN), codes.InvalidArgument, []string{"access mode", "UNKNOWN"}},
		"an access mode of the future":       {withMode(99), codes.InvalidArgument, []string{"access mode", "99"}},
		"an unknown mount flag":              {withCapabilities(writer("noexec", "discard")), codes.InvalidArgument, []string{`"discard"`}},
		"two unknown mount flags":            {withCapabilities(writer("discard", "ro", "data=journal")), codes.InvalidArgument, []string{`"discard"`, `"data=journal"`}},
		"several readers on several nodes":   {withMode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY), codes.InvalidArgument, []string{`"local"`, "not shared"}},
		"one writer on several nodes":        {withMode(csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER), codes.InvalidArgument, []string{`"local"`, "not shared"}},
		"several writers on several nodes":   {withMode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER), codes.InvalidArgument, []string{`"local"`, "not shared"}},
		"several nodes besides":              {withCapabilities(writer(), capability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)), codes.InvalidArgument, []string{"not shared"}},
		"an unknown pool":                    {withParameter("storagePool", "nowhere"), codes.InvalidArgument, []string{`"nowhere"`, `"local"`, `"other"`, `"everywhere"`}},
		"an empty pool name, among several":  {withParameter("storagePool", ""), codes.InvalidArgument, []string{`"local"`, `"other"`, `"everywhere"`}},
		"a pool that is a path":              {withParameter("storagePool", "../etc"), codes.InvalidArgument, []string{`"../etc"`}},
		"no pool where there are several":    {withParameter("unrelated", "x"), codes.InvalidArgument, []string{`"local"`, `"other"`, `"everywhere"`}},
		"the pool's key in lower case":       {withParameter("storagepool", "local"), codes.InvalidArgument, []string{`"storagepool"`, `"storagePool"`}},
		"the pool's key in upper case":       {withParameter("STORAGEPOOL", "local"), codes.InvalidArgument, []string{`"STORAGEPOOL"`, `"storagePool"`}},
		"mutable parameters":                 {func(req *csi.CreateVolumeRequest) { req.MutableParameters = map[string]string{"iops": "9"} }, codes.InvalidArgument, []string{"mutable"}},
		"a negative size":                    {withSize(-1, 0), codes.InvalidArgument, []string{"-1"}},
		"a negative limit":                   {withSize(0, -1), codes.InvalidArgument, []string{"-1"}},
		"a size above the limit":             {withSize(2*mib, mib), codes.OutOfRange, []string{"2097152", "1048576"}},
		"a limit below one block":            {withSize(0, 1), codes.OutOfRange, nil},
		"no whole block within the limits":   {withSize(1, 2), codes.OutOfRange, nil},
		"more bytes than can be counted":     {withSize(math.MaxInt64, 0), codes.OutOfRange, nil},
		"more bytes than the pool has":       {withSize(tooMuch, 0), codes.ResourceExhausted, []string{`"local"`, "4503599627370496"}},
		"more, and the limit allows no less": {withSize(tooMuch, tooMuch), codes.ResourceExhausted, []string{`"local"`}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.CreateVolume(t.Context(), createRequest("vol", withParameter("storagePool", "local"), c.change))
			wantCode(t, err, c.code, c.says...)
		})
	}
	snapshot := func(id string) *csi.VolumeContentSource {
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
	}
	another := func(id string) *csi.VolumeContentSource {
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
	}
	for name, c := range map[string]struct {
		source *csi.VolumeContentSource
		code   codes.Code
		says   string
	}{
		"an unnamed thing":            {&csi.VolumeContentSource{}, codes.InvalidArgument, "neither a snapshot nor a volume"},
		"a snapshot without an id":    {snapshot(""), codes.InvalidArgument, "empty"},
		"a snapshot that is a path":   {snapshot("../s@node"), codes.InvalidArgument, `"../s"`},
		"a snapshot that is not here": {snapshot("s"), codes.NotFound, "snapshot s"},
		"one of another node":         {snapshot("s@elsewhere"), codes.ResourceExhausted, "snapshot s, is on node elsewhere, not on node "},
		"a volume that is not here":   {another("v"), codes.NotFound, "volume v"},
		"a volume that is a snapshot": {another("~s"), codes.InvalidArgument, `"~s"`},
	} {
		t.Run("the content of "+name, func(t *testing.T) {
			_, err := h.CreateVolume(t.Context(), createRequest("vol", withParameter("storagePool", "local"), func(req *csi.CreateVolumeRequest) {
				req.VolumeContentSource = c.source
			}))
			wantCode(t, err, c.code, c.says)
		})
	}
	wantEqual(t, "what the refused calls left", h.ids(t), []string(nil))
}

func TestCreateVolumeAccessModes(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	for mode, in := range map[csi.VolumeCapability_AccessMode_Mode]string{
		csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        "local",
		csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:   "local",
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: "local",
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  "local",
		csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:    "everywhere",
		csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER:  "everywhere",
		csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER:   "everywhere",
	} {
		_, err := h.CreateVolume(t.Context(), createRequest(mode.String(), inPool(in), func(req *csi.CreateVolumeRequest) {
			req.VolumeCapabilities = []*csi.VolumeCapability{capability(mode)}
		}))
		wantCode(t, err, codes.OK)
	}
}

func TestCreateVolumeTopology(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	here, there, nowhere := onNode(nodeName), onNode("node-b"), &csi.Topology{Segments: map[string]string{"zone": "z"}}
	for name, c := range map[string]struct {
		pool                 string
		requisite, preferred []*csi.Topology
		code                 codes.Code
		says                 []string
	}{
		"no topology":                                {"local", nil, nil, codes.OK, nil},
		"this node":                                  {"local", []*csi.Topology{here}, []*csi.Topology{here}, codes.OK, nil},
		"this node, only preferred":                  {"local", nil, []*csi.Topology{here}, codes.OK, nil},
		"this node among others":                     {"local", []*csi.Topology{there, here}, []*csi.Topology{there, here}, codes.OK, nil},
		"another node":                               {"local", []*csi.Topology{there}, []*csi.Topology{there}, codes.ResourceExhausted, []string{`"local"`, nodeName}},
		"another node, only preferred":               {"local", nil, []*csi.Topology{there}, codes.ResourceExhausted, []string{`"local"`, nodeName}},
		"another node, and this one preferred":       {"local", []*csi.Topology{there}, []*csi.Topology{here}, codes.ResourceExhausted, []string{`"local"`, nodeName}},
		"a topology that is not ours":                {"local", []*csi.Topology{nowhere}, nil, codes.ResourceExhausted, []string{`"local"`, nodeName}},
		"another node, for a shared pool":            {"everywhere", []*csi.Topology{there}, nil, codes.OK, nil},
		"this node, for a shared pool":               {"everywhere", []*csi.Topology{here}, nil, codes.OK, nil},
		"another node, for a pool that is not known": {"nowhere", []*csi.Topology{there}, nil, codes.InvalidArgument, []string{`"nowhere"`}},
	} {
		t.Run(name, func(t *testing.T) {
			response, err := h.CreateVolume(t.Context(), createRequest("vol", func(req *csi.CreateVolumeRequest) {
				req.Parameters = map[string]string{"storagePool": c.pool}
				req.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: c.requisite, Preferred: c.preferred}
			}))
			wantCode(t, err, c.code, c.says...)
			if c.code != codes.OK {
				return
			}
			want := []*csi.Topology{here}
			if c.pool == "everywhere" {
				want = nil
			}
			wantEqual(t, "where the volume is", response.GetVolume().GetAccessibleTopology(), want)
			_, err = h.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
			must.Succeed(t, err)
		})
	}
}

// Several pods, one node.
func TestPoolAllowsReadWriteMany(t *testing.T) {
	h := newHarness(t, setup{pools: `[{"name":"local","path":"local","allowReadWriteMany":true}]`})
	several := capability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)
	response, err := h.CreateVolume(t.Context(), createRequest("vol", func(req *csi.CreateVolumeRequest) {
		req.VolumeCapabilities = []*csi.VolumeCapability{several}
	}))
	must.Succeed(t, err)
	wantEqual(t, "where it is", response.GetVolume().GetAccessibleTopology(), []*csi.Topology{onNode(nodeName)})
	confirmed, err := h.ValidateVolumeCapabilities(t.Context(), validateRequest("vol", several))
	must.Succeed(t, err)
	wantEqual(t, "why it is not confirmed", confirmed.GetMessage(), "")
	capacity, err := h.GetCapacity(t.Context(), &csi.GetCapacityRequest{VolumeCapabilities: []*csi.VolumeCapability{several}})
	must.Succeed(t, err)
	if capacity.GetAvailableCapacity() == 0 {
		t.Error("no capacity for what can be made")
	}
}
