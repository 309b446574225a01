package driver_test

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
)

// enforced is a driver whose pools enforce sizes.
func enforced() setup {
	keeper := &quotatest.Fake{As: quota.XFS}
	return setup{options: func(o *pool.Options) {
		o.DetectQuota = func(*dir.Dir) (quota.Facility, error) { return keeper, nil }
	}}
}

func TestNodeExpandVolume(t *testing.T) {
	h := newHarness(t, enforced())
	h.create(t, "vol", "")
	h.create(t, "unpublished", "")
	h.publish(t, "vol", h.target("vol"))
	for name, c := range map[string]struct {
		id, at     string
		size       *csi.CapacityRange
		capability *csi.VolumeCapability
		code       codes.Code
		bytes      int64
		says       string
	}{
		"no volume id":                       {"", "vol", &csi.CapacityRange{}, nil, codes.InvalidArgument, 0, "volume id"},
		"an id that climbs":                  {"..", "vol", &csi.CapacityRange{}, nil, codes.InvalidArgument, 0, "volume id"},
		"a volume that is not there":         {"absent", "vol", &csi.CapacityRange{}, nil, codes.NotFound, 0, "absent"},
		"a path where it is not":             {"unpublished", "vol", &csi.CapacityRange{}, nil, codes.NotFound, 0, "unpublished"},
		"a path that is not there":           {"vol", "nothing", &csi.CapacityRange{}, nil, codes.NotFound, 0, "nothing"},
		"a block capability":                 {"vol", "vol", &csi.CapacityRange{}, block(), codes.InvalidArgument, 0, "block"},
		"a negative size":                    {"vol", "vol", &csi.CapacityRange{RequiredBytes: -1}, nil, codes.InvalidArgument, 0, "negative"},
		"a limit below what is required":     {"vol", "vol", &csi.CapacityRange{RequiredBytes: 2, LimitBytes: 1}, nil, codes.OutOfRange, 0, "required"},
		"shrinking":                          {"vol", "vol", &csi.CapacityRange{RequiredBytes: mib, LimitBytes: 2 * mib}, nil, codes.OutOfRange, 0, "shrink"},
		"more than the pool can promise":     {"vol", "vol", &csi.CapacityRange{RequiredBytes: tooMuch}, nil, codes.FailedPrecondition, 0, "promise"},
		"no size is what it has":             {"vol", "vol", &csi.CapacityRange{}, writer(), codes.OK, 4 * mib, ""},
		"what it has":                        {"vol", "vol", &csi.CapacityRange{RequiredBytes: 4 * mib}, nil, codes.OK, 4 * mib, ""},
		"less, without a limit, is no error": {"vol", "vol", &csi.CapacityRange{RequiredBytes: mib}, nil, codes.OK, 4 * mib, ""},
	} {
		t.Run(name, func(t *testing.T) {
			response, err := h.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
				VolumeId: c.id, VolumePath: h.target(c.at), CapacityRange: c.size, VolumeCapability: c.capability,
			})
			wantCode(t, err, c.code, c.says)
			wantEqual(t, "the size", response.GetCapacityBytes(), c.bytes)
		})
	}
}
