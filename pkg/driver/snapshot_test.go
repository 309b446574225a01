package driver_test

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/must"
)

func inPool(name string) func(*csi.CreateVolumeRequest) {
	return func(req *csi.CreateVolumeRequest) { req.Parameters = map[string]string{"storagePool": name} }
}

func TestCreateSnapshotRequests(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	_, err := h.CreateVolume(t.Context(), createRequest("vol", inPool("local")))
	must.Succeed(t, err)
	_, err = h.CreateVolume(t.Context(), createRequest("shared", inPool("everywhere")))
	must.Succeed(t, err)
	parameter := func(key, value string) map[string]string { return map[string]string{key: value} }
	for name, c := range map[string]struct {
		request *csi.CreateSnapshotRequest
		code    codes.Code
		says    []string
	}{
		"no name":                      {&csi.CreateSnapshotRequest{SourceVolumeId: "vol"}, codes.InvalidArgument, []string{"name is empty"}},
		"no source":                    {&csi.CreateSnapshotRequest{Name: "s"}, codes.InvalidArgument, []string{"source volume id is empty"}},
		"a name that is a path":        {&csi.CreateSnapshotRequest{Name: "../s", SourceVolumeId: "vol"}, codes.InvalidArgument, []string{`"../s"`}},
		"a name that is too long":      {&csi.CreateSnapshotRequest{Name: strings.Repeat("s", 200), SourceVolumeId: "vol"}, codes.InvalidArgument, []string{"200 bytes"}},
		"a source that is a path":      {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "../vol"}, codes.InvalidArgument, []string{`"../vol"`}},
		"a source that is a snapshot":  {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "~s"}, codes.InvalidArgument, []string{`"~s"`}},
		"a source that is not here":    {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "gone"}, codes.NotFound, []string{"gone"}},
		"a source in a shared pool":    {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "shared"}, codes.FailedPrecondition, []string{"everywhere"}},
		"an unknown word":              {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "vol", Parameters: parameter("consistency", "stop")}, codes.InvalidArgument, []string{`"verify"`, `"freeze"`, `"accept"`}},
		"no time":                      {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "vol", Parameters: parameter("maxStall", "500")}, codes.InvalidArgument, []string{"500ms"}},
		"no time at all":               {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "vol", Parameters: parameter("maxStall", "0s")}, codes.InvalidArgument, []string{"maxStall"}},
		"misspelled time":              {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "vol", Parameters: parameter("maxstall", "1s")}, codes.InvalidArgument, []string{`"maxStall"`}},
		"the parameter in other cases": {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "vol", Parameters: parameter("Consistency", "accept")}, codes.InvalidArgument, []string{`"consistency"`}},
		"an unknown parameter":         {&csi.CreateSnapshotRequest{Name: "t", SourceVolumeId: "vol", Parameters: parameter("other", "x")}, codes.OK, nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.CreateSnapshot(t.Context(), c.request)
			wantCode(t, err, c.code, c.says...)
		})
	}
}

func TestListSnapshotsPages(t *testing.T) {
	h := newHarness(t, setup{})
	_, err := h.CreateVolume(t.Context(), createRequest("vol", inPool("local")))
	must.Succeed(t, err)
	for _, name := range []string{"s-3", "s-1", "s-2"} {
		must.Succeed(t, must.Err(h.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: "vol"})))
	}
	var got []string
	token := ""
	for {
		page, err := h.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{MaxEntries: 1, StartingToken: token})
		must.Succeed(t, err)
		for _, e := range page.GetEntries() {
			name, _, _ := strings.Cut(e.GetSnapshot().GetSnapshotId(), "@")
			got = append(got, name)
		}
		if token = page.GetNextToken(); token == "" {
			break
		}
		// What a token names may be gone when it comes back.
		_, err = h.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: got[len(got)-1]})
		must.Succeed(t, err)
	}
	wantEqual(t, "the pages together", got, []string{"s-1", "s-2", "s-3"})
	_, err = h.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{StartingToken: "s-1"})
	wantCode(t, err, codes.Aborted, "starting token")
	_, err = h.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{MaxEntries: -1})
	wantCode(t, err, codes.InvalidArgument, "negative")
	for _, id := range []string{"s-9", "../s", "s-9@elsewhere"} {
		list := must.Value(h.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SnapshotId: id}))(t)
		wantEqual(t, "the list of "+id, len(list.GetEntries()), 0)
	}
	got2, err := h.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: "s-3"})
	must.Succeed(t, err)
	wantEqual(t, "the source", got2.GetSnapshot().GetSourceVolumeId(), "vol")
	_, err = h.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: "s-1"})
	wantCode(t, err, codes.NotFound, "snapshot s-1")
}

// A snapshot can be restored on the node of its volume, and a client is told so.
func TestSnapshotTopology(t *testing.T) {
	h := newHarness(t, setup{})
	_, err := h.CreateVolume(t.Context(), createRequest("vol", inPool("local")))
	must.Succeed(t, err)
	here, there := onNode(nodeName), onNode("elsewhere")
	snapshot := func(required *csi.TopologyRequirement) (*csi.CreateSnapshotResponse, error) {
		return h.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "vol", AccessibilityRequirements: required})
	}
	foreign := &csi.TopologyRequirement{Requisite: []*csi.Topology{there}, Preferred: []*csi.Topology{there}}
	for _, required := range []*csi.TopologyRequirement{foreign, {Preferred: []*csi.Topology{there}}, {Requisite: []*csi.Topology{there}, Preferred: []*csi.Topology{here}}} {
		_, err = snapshot(required)
		wantCode(t, err, codes.ResourceExhausted, "vol", nodeName)
	}
	list, err := h.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	must.Succeed(t, err)
	wantEqual(t, "the snapshots after that", len(list.GetEntries()), 0)

	for what, required := range map[string]*csi.TopologyRequirement{
		"no requirement":       nil,
		"an empty requirement": {},
		"this node":            {Requisite: []*csi.Topology{here}, Preferred: []*csi.Topology{here}},
		"one of two nodes":     {Requisite: []*csi.Topology{there, here}},
	} {
		made := must.Value(snapshot(required))(t)
		wantEqual(t, "the topology for "+what, made.GetSnapshot().GetAccessibleTopology(), []*csi.Topology{here})
	}
	// It is there, and cannot be reached from where it has to be.
	_, err = snapshot(foreign)
	wantCode(t, err, codes.ResourceExhausted)
	list, err = h.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	must.Succeed(t, err)
	wantEqual(t, "the listed topology", list.GetEntries()[0].GetSnapshot().GetAccessibleTopology(), []*csi.Topology{here})
	got, err := h.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: list.GetEntries()[0].GetSnapshot().GetSnapshotId()})
	must.Succeed(t, err)
	wantEqual(t, "the topology of one", got.GetSnapshot().GetAccessibleTopology(), []*csi.Topology{here})
}
