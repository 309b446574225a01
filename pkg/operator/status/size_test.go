package status

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// The API server takes no object of more than 1.5 MiB: a status that is larger would never be written again, however many nodes fail, have
// claims, or are gone. What is waited for comes first.
func TestStatusOfAnyClusterCanBeWritten(t *testing.T) {
	const most, nodeCount, pools = 1 << 20, 2000, 8
	name := func(i int) string { return fmt.Sprintf("ip-10-0-%d-%d.eu-central-1.compute.internal", i/256, i%256) }
	image := corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{
		Reason: "ImagePullBackOff", Message: "Back-off pulling image: " + strings.Repeat("registry.example.com/", 100),
	}}
	object := deployed(hppv1.HostPathProvisionerStatus{})
	object.Spec.StoragePools = nil
	seen := Observed{DaemonSets: nodes(nodeCount, 0, 0)}
	claim := corev1.PersistentVolumeClaim{Status: corev1.PersistentVolumeClaimStatus{
		Phase: corev1.ClaimBound, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("100Gi")},
	}}
	for p := range pools {
		pool := fmt.Sprintf("a-pool-with-a-long-name-%d", p)
		object.Spec.StoragePools = append(object.Spec.StoragePools, hppv1.StoragePool{
			Name: pool, Path: hppv1.HostDirectory("/var/" + pool), PVCTemplate: &hppv1.ClaimTemplate{},
		})
		for i := range nodeCount {
			one := *claim.DeepCopy()
			one.ObjectMeta = metav1.ObjectMeta{Name: render.MounterName(pool, name(i)), Labels: render.PoolLabels(pool)}
			if i == nodeCount-1 {
				one.Status.Phase = corev1.ClaimPending
			}
			seen.Claims = append(seen.Claims, one)
		}
	}
	for i := range nodeCount {
		seen.Pods = append(seen.Pods, podOn(name(i), image))
		seen.DeletedNodes = append(seen.DeletedNodes, hppv1.DeletedNode{Node: "gone-" + name(i)})
	}
	status := Assess(object, current, seen)
	text, err := json.Marshal(status)
	must.Succeed(t, err)
	if len(text) > most {
		t.Errorf("the status has %d bytes, and the API server takes an object of %d", len(text), most)
	}
	for _, pool := range status.StoragePoolStatuses {
		if pool.ClaimStatuses[0].Status.Phase != corev1.ClaimPending {
			t.Errorf("of pool %s the first claim is %+v, want the one that is not bound", pool.Name, pool.ClaimStatuses[0])
		}
	}
}
