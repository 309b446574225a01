package cases_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/test/cluster"
)

// A pool with a template gets a claim and a mounter on each node, and serves volumes. Removed from the object, it is
// unmounted on each node, although another pool's name is the beginning of its own, and its claims stay.
func TestOperatorWithPoolOnClaims(t *testing.T) {
	const class = "hostpath-operator-claims"
	s := begin(t)
	client := s.withOperator()
	ctx := t.Context()
	if _, err := c.Client.StorageV1().StorageClasses().Create(ctx, &storagev1.StorageClass{
		ObjectMeta:        metav1.ObjectMeta{Name: class},
		Provisioner:       cluster.DriverName,
		Parameters:        map[string]string{"storagePool": "local-fast"},
		VolumeBindingMode: pointer(storagev1.VolumeBindingWaitForFirstConsumer),
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Client.StorageV1().StorageClasses().Delete(context.Background(), class, metav1.DeleteOptions{})
	})
	both := `storagePools:
- {name: local, path: /var/hpvolumes}
- name: local-fast
  path: /var/fast
  fsType: ext4
  pvcTemplate: {storageClassName: ` + operatorClass + `, volumeMode: Block, accessModes: [ReadWriteOnce], resources: {requests: {storage: 256Mi}}}`
	if _, err := client.Create(ctx, provisioner(t, "claims", both), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.removeProvisioner("claims") })
	s.condition(client, "claims", "Available", "True")
	s.claim("fast", "32Mi", ofClass(class))
	s.pod("writer", with("fast", "/data"))
	s.ready("writer")
	if got := s.mustRun("writer", "echo hello >/data/file; cat /data/file"); got != "hello\n" {
		t.Errorf("the pod reads %q", got)
	}
	s.remove("writer")
	if err := c.Client.CoreV1().PersistentVolumeClaims(s.namespace).Delete(ctx, "fast", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	s.until("the volume to be deleted", s.volumesOf(s.namespace))

	patch := []byte(`{"spec":{"storagePools":[{"name":"local","path":"/var/hpvolumes"}]}}`)
	if _, err := client.Patch(ctx, "claims", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	s.until("the pool to be unmounted", func(ctx context.Context) (string, error) {
		left, err := c.Client.AppsV1().Deployments(cluster.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "hpp-pool"})
		if err != nil || len(left.Items) == 0 {
			return "", err
		}
		object, err := client.Get(ctx, "claims", metav1.GetOptions{})
		return fmt.Sprintf("%d mounters are left: %v", len(left.Items), object.Object["status"]), err
	})
	s.condition(client, "claims", "Available", "True")
	claims, err := c.Client.CoreV1().PersistentVolumeClaims(cluster.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil || len(claims.Items) != len(c.Nodes) {
		t.Fatalf("there are %d claims (%v), want one of each node", len(claims.Items), err)
	}
	for _, claim := range claims.Items {
		if !strings.HasPrefix(claim.Name, "hpp-pool-local-fast-node-") {
			t.Errorf("a claim has the name %s", claim.Name)
		}
		if err := c.Client.CoreV1().PersistentVolumeClaims(cluster.Namespace).Delete(ctx, claim.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	}
	s.until("the volumes of the claims to be deleted", s.volumesOf(cluster.Namespace))
}

// volumesOf says which volumes there are for the claims of a namespace.
func (s *scene) volumesOf(namespace string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		volumes, err := c.Client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return "", err
		}
		for _, volume := range volumes.Items {
			if claim := volume.Spec.ClaimRef; claim != nil && claim.Namespace == namespace {
				return volume.Name + " is " + string(volume.Status.Phase), nil
			}
		}
		return "", nil
	}
}
