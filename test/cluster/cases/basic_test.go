package cases_test

import (
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// A claim waits for its first pod, is bound on the node of that, holds what pods
// write for as long as it is there, and leaves nothing.
func TestVolumeLifecycleOnCluster(t *testing.T) {
	h := begin(t)
	h.claim("data", "64Mi")
	h.wantEvent("PersistentVolumeClaim", "data", "WaitForFirstConsumer")
	h.wantUnmade("data")
	h.pod("first", with("data", "/data"), on(nodeB))
	pod := h.ready("first")

	claim, err := c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Get(t.Context(), "data", metav1.GetOptions{})
	must.Succeed(t, err)
	volume := h.volume("data")
	want := resource.MustParse("64Mi")
	if got := claim.Status.Capacity.Storage(); got.Cmp(want) != 0 {
		t.Errorf("the claim has %v, want %v", got, &want)
	}
	if got := volume.Spec.Capacity.Storage(); got.Cmp(want) != 0 {
		t.Errorf("the volume has %v, want %v", got, &want)
	}
	if got := h.nodeOf(volume); got != nodeB || pod.Spec.NodeName != nodeB {
		t.Errorf("the volume is for %s and the pod on %s, want both on %s", got, pod.Spec.NodeName, nodeB)
	}

	h.mustRun("first", "echo hello >/data/file; sync -f /data")
	path := filepath.Join(h.disk(volume), "file")
	h.wantFile(path, "hello\n")

	h.remove("first")
	h.wantFile(path, "hello\n")
	h.pod("second", with("data", "/data"))
	if node := h.ready("second").Spec.NodeName; node != nodeB {
		t.Errorf("the second pod is on %s, want it where its volume is, on %s", node, nodeB)
	}
	if got := h.mustRun("second", "cat /data/file"); got != "hello\n" {
		t.Errorf("the second pod reads %q", got)
	}
	h.remove("second")
	h.removeClaim("data")
}

// wantUnmade says that a claim is not bound, and that nothing is made for it.
func (h *harness) wantUnmade(name string) {
	h.Helper()
	claim, err := c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Get(h.Context(), name, metav1.GetOptions{})
	must.Succeed(h, err)
	if claim.Status.Phase != corev1.ClaimPending || claim.Spec.VolumeName != "" {
		h.Errorf("the claim is %s with volume %q, want it to wait for a pod", claim.Status.Phase, claim.Spec.VolumeName)
	}
	if found, err := onDisks(); err != nil || found != "" {
		h.Errorf("there is %s (%v), want nothing made before there is a pod", found, err)
	}
}
