package cases_test

import (
	"context"
	"path/filepath"
	"testing"

	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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

// Who names a pool that there is not reads so on the claim, with the pools that there
// are, and has the volume once the class is right.
func TestUnknownPool(t *testing.T) {
	s := begin(t)
	class := s.namespace
	s.class(class, "nowhere")
	s.claim("data", "64Mi", ofClass(class))
	s.pod("user", with("data", "/data"))
	s.wantEvent("PersistentVolumeClaim", "data", "ProvisioningFailed", `no pool is named "nowhere"`, `"local"`, `"plain"`)

	s.removeClass(class)
	s.class(class, "local")
	s.ready("user")
	if got := s.volume("data").Spec.CSI.VolumeAttributes["storagePool"]; got != "local" {
		t.Errorf("the volume is in pool %q, want local", got)
	}
}

// class makes a StorageClass for a pool, which is gone at the end of the test.
func (s *scene) class(name, pool string) {
	s.Helper()
	binding := storagev1.VolumeBindingWaitForFirstConsumer
	if _, err := c.Client.StorageV1().StorageClasses().Create(s.Context(), &storagev1.StorageClass{
		ObjectMeta:        metav1.ObjectMeta{Name: name},
		Provisioner:       cluster.DriverName,
		Parameters:        map[string]string{"storagePool": pool},
		VolumeBindingMode: &binding,
	}, metav1.CreateOptions{}); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { s.removeClass(name) })
}

// removeClass deletes a StorageClass, if it is there.
func (s *scene) removeClass(name string) {
	s.Helper()
	err := c.Client.StorageV1().StorageClasses().Delete(context.Background(), name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		s.Fatal(err)
	}
}
