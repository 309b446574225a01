package driver_test

import (
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// inline makes a request that of a volume in a pod's own manifest. No size is
// asked for by "".
func inline(size string, more ...string) func(*csi.NodePublishVolumeRequest) {
	return func(req *csi.NodePublishVolumeRequest) {
		req.VolumeContext = map[string]string{
			"csi.storage.k8s.io/ephemeral": "true",
			"csi.storage.k8s.io/pod.name":  "pod",
		}
		if size != "" {
			req.VolumeContext["size"] = size
		}
		for i := 0; i+1 < len(more); i += 2 {
			req.VolumeContext[more[i]] = more[i+1]
		}
	}
}

func (h *harness) publishInline(t *testing.T, id, target string) {
	t.Helper()
	must.Succeed(t, must.Err(h.NodePublishVolume(t.Context(), publishRequest(id, target, inline("8Mi", "storagePool", "local")))))
}

func TestUnpublishDeletesOnlyInlineVolumes(t *testing.T) {
	h := newHarness(t, setup{})
	h.create(t, "csi-persistent", "")
	must.Succeed(t, os.Mkdir(h.path("local", "csi-adopted"), 0o755))
	for _, id := range []string{"csi-persistent", "csi-adopted"} {
		t.Run(id, func(t *testing.T) {
			data := h.path("local", id) + "/data"
			must.Succeed(t, os.WriteFile(data, []byte("data"), 0o600))
			h.publish(t, id, h.target(id))
			// What a request says of an inline volume does not make it one.
			_, err := h.NodePublishVolume(t.Context(), publishRequest(id, h.target("again"), inline("")))
			wantCode(t, err, codes.AlreadyExists, id)
			h.unpublish(t, id, h.target("again"))
			h.unpublish(t, id, h.target(id))
			wantThere(t, data)
		})
	}
}

func TestInlineVolumeIsNotDeletedWhenUnmountFails(t *testing.T) {
	h := newHarness(t, setup{})
	target, data := h.target("vol"), h.path("local", "csi-1")+"/data"
	h.publishInline(t, "csi-1", target)
	must.Succeed(t, os.WriteFile(data, []byte("data"), 0o600))
	release := h.hold(t, target)
	for range 2 {
		_, err := h.NodeUnpublishVolume(t.Context(), unpublishRequest("csi-1", target))
		wantCode(t, err, codes.FailedPrecondition, "csi-1", target)
		wantThere(t, data)
	}
	release()
	h.unpublish(t, "csi-1", target)
	wantGone(t, h.path("local", "csi-1"))
}

func TestInvalidInlineVolumes(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	h.create(t, "second", "local")
	h.publish(t, "second", h.target("taken"))
	for name, c := range map[string]struct {
		target string
		change func(*csi.NodePublishVolumeRequest)
		code   codes.Code
		says   []string
	}{
		"a size that is none":           {"vol", inline("lots", "storagePool", "local"), codes.InvalidArgument, []string{`"size"`, `"lots"`}},
		"a negative size":               {"vol", inline("-1Mi", "storagePool", "local"), codes.InvalidArgument, []string{`"size"`, `"-1Mi"`}},
		"a size beyond counting":        {"vol", inline("100Ei", "storagePool", "local"), codes.InvalidArgument, []string{`"size"`, `"100Ei"`}},
		"a size beyond the pool":        {"vol", inline("4Pi", "storagePool", "local"), codes.ResourceExhausted, []string{`"local"`}},
		"an unknown pool":               {"vol", inline("1Mi", "storagePool", "nowhere"), codes.InvalidArgument, []string{`"nowhere"`}},
		"the pool's key misspelled":     {"vol", inline("1Mi", "storagepool", "local"), codes.InvalidArgument, []string{`"storagepool"`}},
		"a pool among several":          {"vol", inline("1Mi"), codes.InvalidArgument, []string{`"local"`, `"other"`}},
		"a target that is taken":        {"taken", inline("1Mi", "storagePool", "local"), codes.AlreadyExists, []string{h.target("taken")}},
		"a target without a parent":     {"no/such", inline("1Mi", "storagePool", "local"), codes.InvalidArgument, []string{"target"}},
		"one that is not called inline": {"vol", inline("1Mi", "csi.storage.k8s.io/ephemeral", "false"), codes.NotFound, []string{"csi-1"}},
		"a block device": {"vol", func(req *csi.NodePublishVolumeRequest) {
			inline("1Mi", "storagePool", "local")(req)
			req.VolumeCapability = block()
		}, codes.InvalidArgument, []string{"block"}},
		"several nodes": {"vol", func(req *csi.NodePublishVolumeRequest) {
			inline("1Mi", "storagePool", "local")(req)
			req.VolumeCapability = capability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)
		}, codes.InvalidArgument, []string{"not shared"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.NodePublishVolume(t.Context(), publishRequest("csi-1", h.target(c.target), c.change))
			wantCode(t, err, c.code, c.says...)
			wantEqual(t, "all volumes", h.ids(t), []string{"second"})
			wantGone(t, h.target("vol"))
		})
	}
	t.Run("one that is there with another size", func(t *testing.T) {
		h.publishInline(t, "csi-1", h.target("vol"))
		_, err := h.NodePublishVolume(t.Context(), publishRequest("csi-1", h.target("vol"), inline("9Mi", "storagePool", "local")))
		wantCode(t, err, codes.AlreadyExists, "csi-1")
		// A call that failed takes nothing away from one that did not.
		_, err = h.NodePublishVolume(t.Context(), publishRequest("csi-1", h.target("taken"), inline("8Mi", "storagePool", "local")))
		wantCode(t, err, codes.AlreadyExists, h.target("taken"))
		wantThere(t, h.path("local", "csi-1"))
	})
}
