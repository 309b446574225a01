package cases_test

import (
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster"
)

// Each class leads to its own pool, and the volume says whether the kernel keeps
// its size.
func TestTwoPools(t *testing.T) {
	s := begin(t)
	s.claim("local", "64Mi")
	s.claim("plain", "64Mi", ofClass("hostpath-csi-plain"))
	s.pod("user", with("local", "/local"), with("plain", "/plain"))
	node := c.Nodes[s.ready("user").Spec.NodeName]
	s.mustRun("user", "echo local >/local/file; echo plain >/plain/file")

	for claim, want := range map[string]struct{ pool, enforced string }{
		"local": {"/var/hpvolumes", "true"},
		"plain": {"/var/plain", "false"},
	} {
		volume := s.volume(claim)
		s.wantFile(filepath.Join(node.Disk(want.pool), volume.Spec.CSI.VolumeHandle, "file"), claim+"\n")
		if got := volume.Spec.CSI.VolumeAttributes["sizeEnforced"]; got != want.enforced {
			t.Errorf("volume of %s has sizeEnforced %q, want %q", claim, got, want.enforced)
		}
	}
	if _, err := s.run("user", "dd if=/dev/zero of=/local/big bs=1M count=80"); err == nil {
		t.Error("80 MiB fit into a volume of 64 MiB")
	}
	s.mustRun("user", "dd if=/dev/zero of=/plain/big bs=1M count=80")
}

// A pool that there is not has room for nothing, so the scheduler lets the pod
// wait. The driver's own words are heard where the scheduler was not asked.
func TestUnknownPool(t *testing.T) {
	s := begin(t)
	binding := storagev1.VolumeBindingWaitForFirstConsumer
	class, err := c.Client.StorageV1().StorageClasses().Create(t.Context(), &storagev1.StorageClass{
		ObjectMeta:        metav1.ObjectMeta{GenerateName: "no-such-pool-"},
		Provisioner:       cluster.DriverName,
		Parameters:        map[string]string{"storagePool": "nowhere"},
		VolumeBindingMode: &binding,
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Client.StorageV1().StorageClasses().Delete(t.Context(), class.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	}()
	s.claim("data", "64Mi", ofClass(class.Name))
	s.pod("user", with("data", "/data"))
	s.wantEvent("Pod", "user", "FailedScheduling", "did not have enough free storage")

	s.claim("forced", "64Mi", ofClass(class.Name), func(claim *corev1.PersistentVolumeClaim) {
		claim.Annotations = map[string]string{"volume.kubernetes.io/selected-node": nodeA}
	})
	s.wantEvent("PersistentVolumeClaim", "forced", "ProvisioningFailed", "nowhere")
}
