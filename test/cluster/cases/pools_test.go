package cases_test

import (
	"context"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster"
)

// Each class leads to its own pool, and the volume says whether the kernel keeps
// its size.
func TestTwoPools(t *testing.T) {
	h := begin(t)
	h.claim("local", "64Mi")
	h.claim("plain", "64Mi", ofClass("hostpath-csi-plain"))
	h.pod("user", with("local", "/local"), with("plain", "/plain"))
	node := c.Nodes[h.ready("user").Spec.NodeName]
	h.mustRun("user", "echo local >/local/file; echo plain >/plain/file")

	for claim, want := range map[string]struct{ pool, enforced string }{
		"local": {"/var/hpvolumes", "true"},
		"plain": {"/var/plain", "false"},
	} {
		volume := h.volume(claim)
		h.wantFile(filepath.Join(node.Disk(want.pool), volume.Spec.CSI.VolumeHandle, "file"), claim+"\n")
		if got := volume.Spec.CSI.VolumeAttributes["sizeEnforced"]; got != want.enforced {
			t.Errorf("volume of %s has sizeEnforced %q, want %q", claim, got, want.enforced)
		}
	}
	h.wantNoSpace("user", "dd if=/dev/zero of=/local/big bs=1M count=80")
	h.mustRun("user", "dd if=/dev/zero of=/plain/big bs=1M count=80")
}

// A user who names a pool that there is not reads so on the claim, with the pools that there
// are, and has the volume once the class is right.
func TestUnknownPoolIsReportedOnClaim(t *testing.T) {
	h := begin(t)
	class := h.namespace
	h.class(class, "nowhere", storagev1.VolumeBindingWaitForFirstConsumer)
	h.claim("data", "64Mi", ofClass(class))
	h.pod("user", with("data", "/data"))
	h.wantEvent("PersistentVolumeClaim", "data", "ProvisioningFailed", `no pool is named "nowhere"`, `"local"`, `"plain"`)

	h.removeClass(class)
	h.class(class, "local", storagev1.VolumeBindingWaitForFirstConsumer)
	h.ready("user")
	if got := h.volume("data").Spec.CSI.VolumeAttributes["storagePool"]; got != "local" {
		t.Errorf("the volume is in pool %q, want local", got)
	}
}

// A claim that is bound at once gets a volume on a node that has room for it, and its
// pods come there.
func TestImmediateBinding(t *testing.T) {
	h := begin(t)
	h.fill(nodeA, 512*mib)
	class := h.namespace
	h.class(class, "local", storagev1.VolumeBindingImmediate)
	h.claim("data", "1Gi", ofClass(class))
	h.until("the claim to be bound", func(ctx context.Context) (string, error) {
		claim, err := c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Get(ctx, "data", metav1.GetOptions{})
		if err != nil || claim.Status.Phase == corev1.ClaimBound {
			return "", err
		}
		return string(claim.Status.Phase), nil
	})
	if got := h.nodeOf(h.volume("data")); got != nodeB {
		t.Errorf("the volume is on %s, where it has no room", got)
	}
	h.pod("user", with("data", "/data"), preferring(nodeA))
	if got := h.ready("user").Spec.NodeName; got != nodeB {
		t.Errorf("the pod is on %s, its volume on %s", got, nodeB)
	}
	h.mustRun("user", "echo hello >/data/file")
}

// class makes a StorageClass for a pool, which is gone at the end of the test.
func (h *harness) class(name, pool string, binding storagev1.VolumeBindingMode) {
	h.Helper()
	if _, err := c.Client.StorageV1().StorageClasses().Create(h.Context(), &storagev1.StorageClass{
		ObjectMeta:        metav1.ObjectMeta{Name: name},
		Provisioner:       cluster.DriverName,
		Parameters:        map[string]string{"storagePool": pool},
		VolumeBindingMode: &binding,
	}, metav1.CreateOptions{}); err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() { h.removeClass(name) })
}

// removeClass deletes a StorageClass, if it is there.
func (h *harness) removeClass(name string) {
	h.Helper()
	err := c.Client.StorageV1().StorageClasses().Delete(context.Background(), name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		h.Fatal(err)
	}
}
