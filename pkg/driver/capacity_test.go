package driver_test

import (
	"errors"
	"os"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestGetCapacity(t *testing.T) {
	r := newRig(t, setup{pools: `[{"name":"local","path":"local"},{"name":"everywhere","path":"everywhere","shared":true},` +
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
			response, err := r.GetCapacity(t.Context(), c.request)
			must.Succeed(t, err)
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
	r := newRig(t, setup{pools: severalPool})
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
				response, err := r.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: c.parameters, AccessibleTopology: topology})
				must.Succeed(t, err)
				wantEqual(t, "what is available", response.GetAvailableCapacity(), int64(0))
				wantEqual(t, "the largest volume", response.GetMaximumVolumeSize().GetValue(), largest)
			}
			_, err := r.CreateVolume(t.Context(), createRequest("vol", func(req *csi.CreateVolumeRequest) { req.Parameters = c.parameters }))
			wantCode(t, err, codes.InvalidArgument, c.says...)
			// As external-provisioner asks before a node takes a claim with immediate binding.
			_, err = r.GetCapacity(t.Context(), &csi.GetCapacityRequest{
				Parameters: c.parameters, AccessibleTopology: onNode(nodeName), VolumeCapabilities: []*csi.VolumeCapability{writer()},
			})
			wantCode(t, err, codes.InvalidArgument, c.says...)
		})
	}
}

func TestReportedCapacityFitsOneVolume(t *testing.T) {
	disk := testenv.Tmpfs(t, 64*mib)
	r := newRig(t, setup{pools: `[{"name":"local","path":"` + disk + `/pool"}]`})
	withSize := func(bytes int64) func(*csi.CreateVolumeRequest) {
		return func(req *csi.CreateVolumeRequest) { req.CapacityRange = &csi.CapacityRange{RequiredBytes: bytes} }
	}
	capacity := func() int64 {
		t.Helper()
		response, err := r.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
		must.Succeed(t, err)
		return response.GetAvailableCapacity()
	}
	reported := capacity()
	if reported <= 60*mib || reported > 64*mib {
		t.Errorf("%d bytes are reported of an empty disk of 64 MiB", reported)
	}
	_, err := r.CreateVolume(t.Context(), createRequest("large", withSize(reported-8*mib)))
	must.Succeed(t, err)
	wantEqual(t, "what is left", capacity(), int64(8*mib))
	_, err = r.CreateVolume(t.Context(), createRequest("too-large", withSize(9*mib)))
	wantCode(t, err, codes.ResourceExhausted, `"local"`)
	_, err = r.CreateVolume(t.Context(), createRequest("last", withSize(8*mib)))
	must.Succeed(t, err)
	wantEqual(t, "what is left", capacity(), int64(0))
	_, err = r.CreateVolume(t.Context(), createRequest("one-more", withSize(mib)))
	wantCode(t, err, codes.ResourceExhausted, `"local"`)
	wantEqual(t, "all volumes", r.ids(t), []string{"large", "last"})
}

// wantCondition asks all calls that report a condition for that of a published volume.
func (r *rig) wantCondition(t *testing.T, id, target string, abnormal bool, says string) {
	t.Helper()
	reported := r.conditions(t, id)
	stats, err := r.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
	must.Succeed(t, err)
	reported["NodeGetVolumeStats"] = stats.GetVolumeCondition()
	for call, condition := range reported {
		if condition.GetAbnormal() != abnormal {
			t.Errorf("%s reports %v, want abnormal: %v", call, condition, abnormal)
		}
		wantContains(t, condition.GetMessage(), says)
	}
}

func TestCapacityOfFullPool(t *testing.T) {
	disk := testenv.Tmpfs(t, 8*mib)
	r := newRig(t, setup{pools: `[{"name":"local","path":"` + disk + `"}]`})
	r.create(t, "vol", "")
	r.publish(t, "vol", r.target("vol"))
	r.wantCondition(t, "vol", r.target("vol"), false, "in order")
	if err := os.WriteFile(disk+"/vol/data", make([]byte, 9*mib), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("writing more than the disk holds ends with %v", err)
	}
	r.wantCondition(t, "vol", r.target("vol"), true, "no space")
	_, err := r.CreateVolume(t.Context(), createRequest("second", func(req *csi.CreateVolumeRequest) { req.CapacityRange.RequiredBytes = 1 }))
	wantCode(t, err, codes.ResourceExhausted, "second")
	wantEqual(t, "the volumes", r.ids(t), []string{"vol"})

	// A full disk is no reason that a volume cannot go.
	r.unpublish(t, "vol", r.target("vol"))
	_, err = r.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	must.Succeed(t, err)
	wantEqual(t, "the volumes", r.ids(t), []string(nil))
}

func TestCapacityOfReadOnlyPool(t *testing.T) {
	disk := testenv.Tmpfs(t, 64*mib)
	r := newRig(t, setup{pools: `[{"name":"local","path":"` + disk + `"}]`})
	r.create(t, "vol", "")
	must.Succeed(t, syscall.Mount("", disk, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))

	capacity, err := r.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	must.Succeed(t, err)
	wantEqual(t, "its capacity", capacity.GetAvailableCapacity(), int64(0))
	_, err = r.CreateVolume(t.Context(), createRequest("second"))
	wantCode(t, err, codes.ResourceExhausted, "second")
	_, err = r.CreateVolume(t.Context(), createRequest("vol"))
	wantCode(t, err, codes.OK)
	_, err = r.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	wantCode(t, err, codes.Unavailable, "vol", "read-only")
	wantEqual(t, "the volumes", r.ids(t), []string{"vol"})

	// What is there can be read.
	r.publish(t, "vol", r.target("vol"))
	r.wantCondition(t, "vol", r.target("vol"), true, "read-only")
	r.unpublish(t, "vol", r.target("vol"))
}

func TestVolumeInTwoPools(t *testing.T) {
	r := newRig(t, setup{pools: severalPool})
	r.create(t, "vol", "local")
	must.Succeed(t, os.Mkdir(r.path("other", "vol"), 0o755))
	// The context says which is meant.
	_, err := r.NodePublishVolume(t.Context(), publishRequest("vol", r.target("vol"), func(req *csi.NodePublishVolumeRequest) {
		req.VolumeContext = map[string]string{"storagePool": "other"}
	}))
	must.Succeed(t, err)
	wantEqual(t, "where it is published", r.mounts.published(t, r.path("other", ""), "vol"), []string{r.target("vol")})
	_, err = r.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	wantCode(t, err, codes.Internal, "vol", `"local"`, `"other"`)
	_, err = r.NodePublishVolume(t.Context(), publishRequest("vol", r.target("vol")))
	wantCode(t, err, codes.Internal, "vol", `"local"`, `"other"`)
	wantThere(t, r.path("local", "vol"))
	wantThere(t, r.path("other", "vol"))
	// A pod must be able to end all the same.
	r.unpublish(t, "vol", r.target("vol"))
}

func TestMissingPool(t *testing.T) {
	r := newRig(t, setup{pools: missingPool})
	in := func(pool string) func(*csi.CreateVolumeRequest) {
		return func(req *csi.CreateVolumeRequest) { req.Parameters = map[string]string{"storagePool": pool} }
	}
	t.Run("makes no volume, and another node is tried", func(t *testing.T) {
		_, err := r.CreateVolume(t.Context(), createRequest("vol", in("away")))
		wantCode(t, err, codes.ResourceExhausted, `"away"`, "requireMount")
	})
	t.Run("nothing is written below its path", func(t *testing.T) {
		wantGone(t, r.path("away", ".hostpath-provisioner"))
		wantGone(t, r.path("away", "vol"))
	})
	t.Run("the others serve", func(t *testing.T) {
		r.create(t, "vol", "local")
		r.publish(t, "vol", r.target("vol"))
		wantEqual(t, "all volumes", r.ids(t), []string{"vol"})
		r.unpublish(t, "vol", r.target("vol"))
		_, err := r.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
		must.Succeed(t, err)
	})
	// A volume that is not seen may be in the pool that is not seen.
	for name, call := range map[string]func(t *testing.T) error{
		"a volume is not reported as deleted": func(t *testing.T) error {
			_, err := r.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "unseen"})
			return err
		},
		"a volume is not reported as absent": func(t *testing.T) error {
			_, err := r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: "unseen"})
			return err
		},
		"a volume is not validated": func(t *testing.T) error {
			_, err := r.ValidateVolumeCapabilities(t.Context(), validateRequest("unseen", writer()))
			return err
		},
		"a volume is not published": func(t *testing.T) error {
			_, err := r.NodePublishVolume(t.Context(), publishRequest("unseen", r.target("unseen")))
			return err
		},
		"a volume is not measured": func(t *testing.T) error {
			_, err := r.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "unseen", VolumePath: r.target("unseen")})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) { wantCode(t, call(t), codes.Unavailable, `"away"`, "requireMount") })
	}
	t.Run("a pod can end", func(t *testing.T) { r.unpublish(t, "unseen", r.target("unseen")) })
	t.Run("the driver is ready", func(t *testing.T) {
		probe, err := r.Probe(t.Context(), &csi.ProbeRequest{})
		must.Succeed(t, err)
		wantEqual(t, "ready", probe.GetReady().GetValue(), true)
	})
}
