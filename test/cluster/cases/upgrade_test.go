package cases_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster"
)

// earlier makes a volume as the earlier driver has left it: a directory in the
// pool, and a PersistentVolume that carries its name.
func (s *scene) earlier(node, handle, claim string) *corev1.PersistentVolume {
	s.Helper()
	dir := filepath.Join(c.Nodes[node].Disk("/var/hpvolumes"), handle)
	if err := os.Mkdir(dir, 0o777); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { os.RemoveAll(dir) })
	// Not what the umask leaves of it.
	if err := os.Chmod(dir, 0o777); err != nil {
		s.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("from before\n"), 0o644); err != nil {
		s.Fatal(err)
	}
	volume, err := c.Client.CoreV1().PersistentVolumes().Create(s.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name:        handle,
			Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": cluster.DriverName},
			Finalizers:  []string{"external-provisioner.volume.kubernetes.io/finalizer"},
		},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("8Gi")},
			AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			StorageClassName:              "hostpath-csi",
			ClaimRef:                      &corev1.ObjectReference{Namespace: s.namespace, Name: claim},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver:       cluster.DriverName,
				VolumeHandle: handle,
				VolumeAttributes: map[string]string{
					"csi.storage.k8s.io/pv/name":                   handle,
					"csi.storage.k8s.io/pvc/name":                  claim,
					"csi.storage.k8s.io/pvc/namespace":             s.namespace,
					"storage.kubernetes.io/csiProvisionerIdentity": "1700000000000-8081-" + cluster.DriverName + "-" + node,
					"storagePool": "local",
				},
			}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{
					{Key: "topology.hostpath.csi/node", Operator: corev1.NodeSelectorOpIn, Values: []string{node}},
				},
			}}}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		s.Fatal(err)
	}
	s.claim(claim, "8Gi", func(claim *corev1.PersistentVolumeClaim) { claim.Spec.VolumeName = volume.Name })
	return volume
}

// What the earlier driver has made is mounted, reported and deleted like what
// this one makes.
func TestVolumesOfTheEarlierDriver(t *testing.T) {
	s := begin(t)
	volume := s.earlier(nodeB, "pvc-1b4e28ba-2fa1-11d2-883f-0016d3cca427", "old")
	s.pod("user", with("old", "/data"))
	if got := s.ready("user").Spec.NodeName; got != nodeB {
		t.Errorf("the pod is on %s, its volume on %s", got, nodeB)
	}
	if got := s.mustRun("user", "cat /data/file; echo more >>/data/file"); got != "from before\n" {
		t.Errorf("the pod reads %q", got)
	}
	s.wantFile(filepath.Join(s.disk(volume), "file"), "from before\nmore\n")
	s.until("kubelet to show the size of the pool", func(ctx context.Context) (string, error) {
		got, err := s.shown(ctx, nodeB, "old")
		if got == 8*gib {
			return "", err
		}
		return fmt.Sprintf("shows %d", got), err
	})
	s.remove("user")
	s.removeClaim("old")
}

// Who takes the driver off the cluster keeps the data, and who puts it back has
// it again. Pods that run meanwhile do not notice.
func TestUninstallAndInstallAgain(t *testing.T) {
	s := begin(t)
	all := s.writers(2)
	s.claim("data", "64Mi")
	s.pod("first", with("data", "/data"))
	s.ready("first")
	s.mustRun("first", "echo hello >/data/file")
	s.remove("first")
	path := s.disk(s.volume("data"))

	if err := c.Uninstall(t.Context(), kustomization); err != nil {
		t.Fatal(err)
	}
	s.wantFile(filepath.Join(path, "file"), "hello\n")
	s.goOn(all)
	if err := c.Install(t.Context(), kustomization); err != nil {
		t.Fatal(err)
	}
	s.goOn(all)
	s.wantUninterrupted(all)
	s.pod("second", with("data", "/data"))
	s.ready("second")
	if got := s.mustRun("second", "cat /data/file"); got != "hello\n" {
		t.Errorf("the second pod reads %q", got)
	}
	s.remove("second")
	s.removeClaim("data")
}
