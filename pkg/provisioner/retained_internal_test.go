package provisioner

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A directory that is removed by hand leaves its promise behind, which nothing would take back.
func TestRetainedVolume_isRemovedWithItsPromiseAsItsEventSays(t *testing.T) {
	h := newHarness(t, Config{Mode: PerNode})
	_, _, err := h.Provision(t.Context(), request())
	must.Succeed(t, err)
	pv := own(t, h.config.Path)
	pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	const advice = "set persistentVolumeReclaimPolicy of the PersistentVolume to Delete"
	if h.ShouldDelete(t.Context(), pv) || !strings.Contains(strings.Join(h.events(), "\n"), advice) {
		t.Errorf("the events are %q, want advice to %s", h.events(), advice)
	}
	pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimDelete
	if !h.ShouldDelete(t.Context(), pv) {
		t.Error("it is not deleted")
	}
	must.Succeed(t, h.Delete(t.Context(), pv))
	set, ok := h.pool.(*pool.Set)
	if promised := set.Status()[0].Promised; !ok || promised != 0 || len(h.directories()) > 0 {
		t.Errorf("%d bytes are promised, and left are %v", promised, h.directories())
	}
}
