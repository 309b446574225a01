package driver_test

import (
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
)

// conditions are those of a volume in the answers that report it.
func (h *harness) conditions(t *testing.T, id string) map[string]*oldcsi.VolumeCondition {
	t.Helper()
	all := map[string]*oldcsi.VolumeCondition{"ControllerGetVolume": oldcsi.Condition(h.volume(t, id).GetStatus())}
	list := must.Value(h.ListVolumes(t.Context(), &csi.ListVolumesRequest{}))(t)
	for _, entry := range list.GetEntries() {
		if entry.GetVolume().GetVolumeId() == id {
			all["ListVolumes"] = oldcsi.Condition(entry.GetStatus())
		}
	}
	return all
}

func TestValidateVolumeCapabilities(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	h.create(t, "vol", "local")
	h.create(t, "shared-vol", "everywhere")
	h.create(t, "lost", "local")
	must.Succeed(t, os.Remove(h.path("local", "lost")))
	_, err := h.CreateVolume(t.Context(), createRequest("disk", func(req *csi.CreateVolumeRequest) {
		req.Parameters = map[string]string{"storagePool": "local"}
		req.VolumeCapabilities = []*csi.VolumeCapability{block()}
	}))
	must.Succeed(t, err)
	several := csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	inPool := func(name string) map[string]string {
		return map[string]string{"storagePool": name, "of": "another driver"}
	}
	for name, c := range map[string]struct {
		request *csi.ValidateVolumeCapabilitiesRequest
		code    codes.Code
		says    string // in the error, or in the message of what is not confirmed
	}{
		"a directory is confirmed":                     {validateRequest("vol", writer()), codes.OK, ""},
		"mount flags are confirmed":                    {validateRequest("vol", writer("ro", "nosuid")), codes.OK, ""},
		"several capabilities are confirmed":           {validateRequest("vol", writer(), capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY)), codes.OK, ""},
		"several nodes are confirmed for a shared one": {validateRequest("shared-vol", capability(several)), codes.OK, ""},
		"a block device is confirmed for a disk":       {validateRequest("disk", block()), codes.OK, ""},
		"its pool is confirmed": {&csi.ValidateVolumeCapabilitiesRequest{VolumeId: "vol", VolumeCapabilities: []*csi.VolumeCapability{writer()},
			Parameters: inPool("local"), VolumeContext: inPool("local")}, codes.OK, ""},

		"another pool in the parameters is not": {&csi.ValidateVolumeCapabilitiesRequest{VolumeId: "vol", VolumeCapabilities: []*csi.VolumeCapability{writer()},
			Parameters: inPool("other")}, codes.OK, `"other"`},
		"another pool in the context is not": {&csi.ValidateVolumeCapabilitiesRequest{VolumeId: "vol", VolumeCapabilities: []*csi.VolumeCapability{writer()},
			VolumeContext: inPool("other")}, codes.OK, `"other"`},
		"mutable parameters are not": {&csi.ValidateVolumeCapabilitiesRequest{VolumeId: "vol", VolumeCapabilities: []*csi.VolumeCapability{writer()},
			MutableParameters: map[string]string{"iops": "9"}}, codes.OK, "mutable"},
		"a block device is not":                    {validateRequest("vol", block()), codes.OK, "block"},
		"a block device besides is not":            {validateRequest("vol", writer(), block()), codes.OK, "block"},
		"a directory of a disk is not":             {validateRequest("disk", writer()), codes.OK, "block"},
		"several nodes are not":                    {validateRequest("vol", capability(several)), codes.OK, `"local"`},
		"an unknown mount flag is not":             {validateRequest("vol", writer("discard")), codes.OK, `"discard"`},
		"an access mode of a later version is not": {validateRequest("vol", capability(99)), codes.OK, "99"},
		"no access mode":                           {validateRequest("vol", &csi.VolumeCapability{AccessType: writer().AccessType}), codes.InvalidArgument, "no access mode"},
		"the access mode UNKNOWN":                  {validateRequest("vol", capability(csi.VolumeCapability_AccessMode_UNKNOWN)), codes.InvalidArgument, "UNKNOWN"},
		"no access type in the second":             {validateRequest("vol", writer(), &csi.VolumeCapability{AccessMode: writer().AccessMode}), codes.InvalidArgument, "no access type"},
		"a missing capability":                     {validateRequest("vol", nil), codes.InvalidArgument, "no access type"},
		"no capability is an invalid argument":     {validateRequest("vol"), codes.InvalidArgument, "capabilities are missing"},
		"a volume that is not there":               {validateRequest("absent", writer()), codes.NotFound, "absent"},
		"a volume whose directory is lost":         {validateRequest("lost", writer()), codes.NotFound, "put the directory back"},
		"an absent volume, and no capability":      {validateRequest("absent"), codes.InvalidArgument, "capabilities are missing"},
		"an absent volume as a block device":       {validateRequest("absent", block()), codes.NotFound, "absent"},
		"an absent volume with an unknown flag":    {validateRequest("absent", writer("discard")), codes.NotFound, "absent"},
		"an id that leads out of the pool":         {validateRequest("..", writer()), codes.InvalidArgument, `".."`},
		"an empty id":                              {validateRequest("", writer()), codes.InvalidArgument, "empty"},
	} {
		t.Run(name, func(t *testing.T) {
			response, err := h.ValidateVolumeCapabilities(t.Context(), c.request)
			if c.code != codes.OK {
				wantCode(t, err, c.code, c.says)
				return
			}
			must.Succeed(t, err)
			if c.says != "" {
				wantContains(t, response.GetMessage(), c.says)
				wantEqual(t, "what is confirmed", response.GetConfirmed(), (*csi.ValidateVolumeCapabilitiesResponse_Confirmed)(nil))
				return
			}
			wantEqual(t, "the answer", response, &csi.ValidateVolumeCapabilitiesResponse{
				Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
					VolumeContext:      c.request.GetVolumeContext(),
					VolumeCapabilities: c.request.GetVolumeCapabilities(),
					Parameters:         c.request.GetParameters(),
				},
			})
		})
	}
}

func validateRequest(id string, wanted ...*csi.VolumeCapability) *csi.ValidateVolumeCapabilitiesRequest {
	return &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: wanted}
}
