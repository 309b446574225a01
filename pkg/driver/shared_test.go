package driver_test

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// twoNodes serve one pool.
func twoNodes(t *testing.T) (a, b *harness) {
	t.Helper()
	pools := `[{"name":"everywhere","path":"` + t.TempDir() + `","shared":true}]`
	return newHarness(t, setup{pools: pools, node: "node-a"}), newHarness(t, setup{pools: pools, node: "node-b"})
}

// Each node's external-provisioner deletes the volumes of a shared pool, and a request names no
// pool. A node that does not know the pool yet, during its rollout, cannot tell such a volume
// from one that is gone. The volume stays where it is, and can still be deleted.
func TestDeleteOnNodeWithoutSharedPool(t *testing.T) {
	a, _ := twoNodes(t)
	a.create(t, "vol", "")
	before := newHarness(t, setup{node: "node-b"})
	_, err := before.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	must.Succeed(t, err)
	wantEqual(t, "the list of the node that has the pool", a.ids(t), []string{"vol"})
	_, err = a.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	must.Succeed(t, err)
	wantEqual(t, "the list afterwards", a.ids(t), []string(nil))
}

func TestDeleteRefusesVolumePublishedOnOtherNode(t *testing.T) {
	a, b := twoNodes(t)
	a.create(t, "vol", "")
	publishedOn := func() map[string][]string {
		t.Helper()
		return map[string][]string{
			"reported by a": a.volume(t, "vol").GetStatus().GetPublishedNodeIds(),
			"reported by b": b.volume(t, "vol").GetStatus().GetPublishedNodeIds(),
			"listed by a":   a.page(t, "", 0).GetEntries()[0].GetStatus().GetPublishedNodeIds(),
		}
	}
	wantRefused := func(says string) {
		t.Helper()
		_, err := a.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
		wantCode(t, err, codes.FailedPrecondition, "vol", says)
	}
	b.publish(t, "vol", b.target("vol"))
	wantEqual(t, "published by b", publishedOn(), map[string][]string{"reported by a": {"node-b"}, "reported by b": {"node-b"}, "listed by a": {"node-b"}})
	wantRefused("node-b")

	_, err := a.NodePublishVolume(t.Context(), publishRequest("vol", a.target("vol")))
	wantCode(t, err, codes.FailedPrecondition, "vol", "node-b", "its access mode allows one node")
	_, err = a.NodePublishVolume(t.Context(), publishRequest("vol", a.target("vol"), func(r *csi.NodePublishVolumeRequest) {
		r.VolumeCapability.AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	}))
	must.Succeed(t, err)
	wantEqual(t, "published by both", publishedOn(), map[string][]string{
		"reported by a": {"node-a", "node-b"}, "reported by b": {"node-b", "node-a"}, "listed by a": {"node-a", "node-b"},
	})
	b.unpublish(t, "vol", b.target("vol"))
	wantEqual(t, "published by a", publishedOn(), map[string][]string{"reported by a": {"node-a"}, "reported by b": {"node-a"}, "listed by a": {"node-a"}})
	wantRefused(a.target("vol"))

	a.unpublish(t, "vol", a.target("vol"))
	wantEqual(t, "published by none", publishedOn(), map[string][]string{"reported by a": nil, "reported by b": nil, "listed by a": nil})
	_, err = b.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	must.Succeed(t, err)
}
