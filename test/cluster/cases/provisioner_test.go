package cases_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster"
)

// A form is one of the two of the provisioner from before CSI, as its overlay installs it.
type form struct{ overlay, namespace, path string }

var (
	perNode    = form{"../overlay/provisioner", "kubevirt-hostpath-provisioner", "/var/plain/.provisioner"}
	singleNode = form{"../overlay/single-node", "hostpath-provisioner-single-node", "/var/plain/.single-node"}
)

// install has the form there until the end of the test, when its directories have to be empty.
func (s *scene) install(f form) {
	s.Helper()
	s.Cleanup(func() {
		for name, n := range c.Nodes {
			if left, err := filepath.Glob(filepath.Join(n.Disk(f.path), "[a-z]*")); err != nil || len(left) > 0 {
				s.Errorf("left on the disk of %s: %v (%v)", name, left, err)
			}
			s.must(os.RemoveAll(n.Disk(f.path)))
		}
	})
	s.apply("-k", f.overlay)
}

func (s *scene) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// provisioners waits for as many pods of a form as are wanted, ready or only running.
func (s *scene) provisioners(f form, count int, ready bool) (pods []corev1.Pod) {
	s.Helper()
	s.until("provisioners of "+f.namespace, func(ctx context.Context) (string, error) {
		list, err := c.Client.CoreV1().Pods(f.namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return "", err
		}
		pods = list.Items
		var waiting []string
		for _, pod := range pods {
			if pod.Status.Phase != corev1.PodRunning || podReady(pod) != ready {
				waiting = append(waiting, pod.Name+" "+string(pod.Status.Phase)+" "+cluster.State(pod))
			}
		}
		if len(pods) == count && len(waiting) == 0 {
			return "", nil
		}
		return fmt.Sprintf("%d of %d: %s", len(pods), count, strings.Join(waiting, ", ")), nil
	})
	return pods
}

// hostPath is what a claim is bound to, its node, and its directory as it is seen from outside.
func (s *scene) hostPath(claim string) (volume *corev1.PersistentVolume, node, directory string) {
	s.Helper()
	s.until("claim "+claim+" to be bound", func(ctx context.Context) (string, error) {
		bound, err := c.Client.CoreV1().PersistentVolumeClaims(s.namespace).Get(ctx, claim, metav1.GetOptions{})
		if err != nil || bound.Status.Phase == corev1.ClaimBound {
			return "", err
		}
		return string(bound.Status.Phase), nil
	})
	volume = s.volume(claim)
	node = volume.Annotations["hostPathProvisionerIdentity"]
	if volume.Spec.HostPath == nil || c.Nodes[node] == nil {
		s.Fatalf("volume %s has the source %+v and the identity %q", volume.Name, volume.Spec.PersistentVolumeSource, node)
	}
	return volume, node, c.Nodes[node].Disk(volume.Spec.HostPath.Path)
}

// wantVolumeGone waits until a PersistentVolume and its directory are gone.
func (s *scene) wantVolumeGone(volume, directory string) {
	s.Helper()
	s.until("volume "+volume+" to be gone", func(ctx context.Context) (string, error) {
		left, err := c.Client.CoreV1().PersistentVolumes().Get(ctx, volume, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "", nil
		}
		return string(left.Status.Phase), err
	})
	s.wantGone(directory)
}

func madeOn(node string) func(*corev1.PersistentVolumeClaim) {
	return func(claim *corev1.PersistentVolumeClaim) {
		claim.Annotations = map[string]string{"kubevirt.io/provisionOnNode": node}
	}
}

func TestProvisionerOnEachNode(t *testing.T) {
	s := begin(t)
	s.install(perNode)
	s.provisioners(perNode, len(c.Nodes), true)

	// What a user applies.
	example := perNode.overlay + "/example"
	s.kubectl("apply", "-n", s.namespace, "-k", example)
	pod := s.ready("hostpath-provisioner-example")
	volume, node, directory := s.hostPath("hostpath-provisioner-example")
	if pod.Spec.NodeName != node || volume.Spec.Capacity.Storage().String() != "100Mi" {
		t.Errorf("the pod is on %s, its volume of %s on %s", pod.Spec.NodeName, volume.Spec.Capacity.Storage(), node)
	}
	s.wantFile(filepath.Join(directory, "SUCCESS"), "Hello\n")
	s.kubectl("delete", "-n", s.namespace, "-k", example)
	s.wantVolumeGone(volume.Name, directory)

	// The annotation wins, and works where the class binds at once.
	const class = "hostpath-provisioner-immediate"
	s.claim("named", "10Mi", ofClass(class), madeOn(nodeB))
	s.claim("nowhere", "10Mi", ofClass(class), madeOn("node-z"))
	s.claim("unnamed", "10Mi", ofClass(class))
	s.claim("shared", "10Mi", ofClass(class), madeOn(nodeA), func(claim *corev1.PersistentVolumeClaim) {
		claim.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
	})
	named, node, namedDirectory := s.hostPath("named")
	if node != nodeB {
		t.Errorf("the volume is on %s", node)
	}
	s.wantEvent("PersistentVolumeClaim", "nowhere", "ProvisioningFailed", "node-z", "does not exist")
	s.wantEvent("PersistentVolumeClaim", "unnamed", "ProvisioningFailed", "binds immediately")
	s.wantEvent("PersistentVolumeClaim", "shared", "ProvisioningFailed", "ReadWriteMany is not supported")
	s.foreignVolumes()
	s.kubectl("delete", "pvc", "-n", s.namespace, "--all")
	s.wantVolumeGone(named.Name, namedDirectory)
}

// foreignVolumes makes PersistentVolumes that claim to be of the provisioner and are not: their directories stay.
func (s *scene) foreignVolumes() {
	s.Helper()
	outside := c.Nodes[nodeA].Disk("/var/plain/.outside")
	s.must(os.Mkdir(outside, 0o755))
	s.Cleanup(func() { s.must(os.RemoveAll(outside)) })
	const uid = "pvc-11111111-2222-3333-4444-555555555555"
	// As the upstream provisioner left it: without a record.
	earlier := filepath.Join(c.Nodes[nodeA].Disk(perNode.path), uid)
	s.must(os.MkdirAll(filepath.Join(earlier, "sub"), 0o777))
	for name, path := range map[string]string{"case-outside": "/var/plain/.outside", uid: perNode.path + "/" + uid} {
		s.applyText(fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolume
metadata:
  name: %[1]s
  annotations:
    pv.kubernetes.io/provisioned-by: kubevirt.io/hostpath-provisioner
    hostPathProvisionerIdentity: %[2]s
    kubevirt.io/provisionOnNode: %[2]s
spec:
  capacity: {storage: 10Mi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Delete
  storageClassName: hostpath-provisioner
  hostPath: {path: %[3]s}
  claimRef: {apiVersion: v1, kind: PersistentVolumeClaim, namespace: %[4]s, name: gone, uid: 66666666-2222-3333-4444-555555555555}
`, name, nodeA, path, s.namespace))
	}
	s.wantVolumeGone(uid, earlier)
	s.until("an event about the foreign volume", func(ctx context.Context) (string, error) {
		events, err := c.Client.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=case-outside"})
		if err != nil {
			return "", err
		}
		for _, e := range events.Items {
			if hasAll(e.Reason+" "+e.Message, []string{"VolumeFailedDelete", "no directory was removed", "/var/plain/.outside"}) {
				return "", nil
			}
		}
		return fmt.Sprintf("%d others", len(events.Items)), nil
	})
	if _, err := os.Stat(outside); err != nil {
		s.Errorf("a directory that is not of the pool is gone: %v", err)
	}
	s.kubectl("patch", "pv", "case-outside", "--type=merge", "--patch", `{"metadata":{"finalizers":null}}`)
}

func TestProvisionerOnSingleNode(t *testing.T) {
	s := begin(t)
	s.install(singleNode)
	example := singleNode.overlay + "/example"

	// With two nodes it would make two directories of one volume.
	pod := s.provisioners(singleNode, 1, false)[0]
	s.kubectl("apply", "-n", s.namespace, "-k", example)
	s.wantEvent("PersistentVolumeClaim", "test-claim", "ProvisioningFailed", "node-a, node-b", "PV_DIR_SHARED")

	other := nodeA
	if pod.Spec.NodeName == nodeA {
		other = nodeB
	}
	s.cordon(other, true)
	t.Cleanup(func() { s.cordon(other, false) })
	s.ready("test-pod")
	s.provisioners(singleNode, 1, true)
	volume, _, directory := s.hostPath("test-claim")
	if want := s.namespace + "-test-claim-" + volume.Name; filepath.Base(directory) != want {
		t.Errorf("the directory is %s, want %s", filepath.Base(directory), want)
	}
	if volume.Spec.AccessModes[0] != corev1.ReadWriteMany {
		t.Errorf("the access modes are %v", volume.Spec.AccessModes)
	}
	s.wantFile(filepath.Join(directory, "SUCCESS"), "Hello\n")
	s.kubectl("delete", "-n", s.namespace, "-k", example)
	s.wantVolumeGone(volume.Name, directory)
}
