package cases_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

const (
	devicesNamespace = "local-pv-provisioner"
	configAnnotation = "local-pv-provisioner.cybozu.io/pv-spec-configmap"
	deviceIdentity   = "local-pv-provisioner.cybozu.io/device-identity"
	legacyLabel      = "local-pv-provisioner.cybozu.com/node"
)

// disks is where the disks of a node are: links to loop devices that the test has made, and nothing else.
func disks(node string) string { return filepath.Join(c.Sandbox.Dir, "disks", node) }

// installDevices installs deploy/devices with the directory of the disks.
func (h *harness) installDevices() {
	h.Helper()
	for _, n := range c.Nodes {
		must.Succeed(h, os.MkdirAll(disks(n.Name), 0o755))
		must.Succeed(h, n.Import(h.Context(), filepath.Join(c.Programs, "local-pv-provisioner.tar")))
	}
	base, err := filepath.Abs("../../../deploy/devices")
	must.Succeed(h, err)
	overlay := h.TempDir()
	relative, err := filepath.Rel(overlay, base)
	must.Succeed(h, err)
	must.Succeed(h, os.WriteFile(filepath.Join(overlay, "kustomization.yaml"), fmt.Appendf(nil, `
resources: [%q]
images: [{name: ghcr.io/kubevirt/hostpath-provisioner/local-pv-provisioner, newName: localhost/local-pv-provisioner, newTag: test}]
patches:
- patch: |-
    apiVersion: apps/v1
    kind: DaemonSet
    metadata: {name: local-pv-provisioner, namespace: local-pv-provisioner}
    spec:
      template:
        spec:
          containers:
          - name: provisioner
            env: [{name: LP_NESTED_NODE, value: "true"}, {name: LP_NEW_DEVICE_DELAY, value: 1s}]
            volumeMounts: [{name: disks, mountPath: %[2]q, readOnly: true}]
          volumes:
          - {name: disks, hostPath: {path: %[2]q, type: Directory}}
          - {name: records, hostPath: {path: /run/containerd/devices, type: DirectoryOrCreate}}
`, relative, filepath.Join(c.Sandbox.Dir, "disks")), 0o600))
	_, err = c.Kubectl(h.Context(), "apply", "-k", overlay)
	must.Succeed(h, err)
	h.Cleanup(func() {
		if _, err := c.Kubectl(context.Background(), "delete", "-k", overlay, "--timeout=1m"); err != nil {
			h.Error(err)
		}
	})
	h.until("the provisioner on every node", func(ctx context.Context) (string, error) {
		set, err := c.Client.AppsV1().DaemonSets(devicesNamespace).Get(ctx, "local-pv-provisioner", metav1.GetOptions{})
		if err != nil || int(set.Status.NumberReady) == len(c.Nodes) {
			return "", err
		}
		return fmt.Sprintf("%d of %d", set.Status.NumberReady, len(c.Nodes)), nil
	})
}

// addDisk gives a node a disk, and answers its device.
func (h *harness) addDisk(node, name string, bytes int64) string {
	h.Helper()
	return h.attachDisk(node, name, h.image(bytes))
}

// image is an empty file for a disk.
func (h *harness) image(bytes int64) string {
	h.Helper()
	image := filepath.Join(h.TempDir(), "disk")
	must.Succeed(h, os.WriteFile(image, nil, 0o600))
	must.Succeed(h, os.Truncate(image, bytes))
	return image
}

// attachDisk makes a file a disk of a node, and answers its device.
func (h *harness) attachDisk(node, name, image string) string {
	h.Helper()
	device, err := loopfs.Attach(image)
	must.Succeed(h, err)
	h.Cleanup(func() { device.Close() })
	must.Succeed(h, os.MkdirAll(disks(node), 0o755))
	must.Succeed(h, os.Symlink(device.Name(), filepath.Join(disks(node), name)))
	h.Cleanup(func() { os.Remove(filepath.Join(disks(node), name)) })
	return device.Name()
}

// offer annotates a node with a configuration.
func (h *harness) offer(node string, data map[string]string) {
	h.Helper()
	data["deviceDir"], data["deviceNameFilter"] = disks(node), "^disk"
	name := "devices-" + node
	maps := c.Client.CoreV1().ConfigMaps(devicesNamespace)
	_ = maps.Delete(h.Context(), name, metav1.DeleteOptions{}) // there may be none yet
	_, err := maps.Create(h.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: data}, metav1.CreateOptions{})
	must.Succeed(h, err)
	h.annotate(node, fmt.Sprintf("%q", name))
}

func (h *harness) annotate(node, value string) {
	h.Helper()
	h.annotateWith(node, configAnnotation, value)
}

func (h *harness) annotateWith(node, key, value string) {
	h.Helper()
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%s}}}`, key, value)
	_, err := c.Client.CoreV1().Nodes().Patch(context.Background(), node, types.MergePatchType, patch, metav1.PatchOptions{})
	must.Succeed(h, err)
}

// localVolumes waits until a node has so many volumes in a phase, and answers them.
func (h *harness) deviceVolumes(node string, phase corev1.PersistentVolumePhase, want int) []corev1.PersistentVolume {
	h.Helper()
	var found []corev1.PersistentVolume
	h.until(fmt.Sprintf("%d volumes of %s to be %s", want, node, phase), func(ctx context.Context) (string, error) {
		list, err := c.Client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{LabelSelector: legacyLabel + "=" + node})
		if err != nil {
			return "", err
		}
		found = nil
		for _, pv := range list.Items {
			if pv.Status.Phase == phase {
				found = append(found, pv)
			}
		}
		if len(found) != want {
			return fmt.Sprintf("%d of %d", len(found), len(list.Items)), nil
		}
		return "", nil
	})
	return found
}

func ofLocalStorage(claim *corev1.PersistentVolumeClaim) {
	class := "local-storage"
	claim.Spec.StorageClassName = &class
}

// Devices are offered, used, cleaned and offered again, in each way that a volume can be used, on all nodes at once.
func TestDevices(t *testing.T) {
	h := begin(t)
	h.installDevices()
	agent := h.asPod(h.podOn(nodeA, devicesNamespace, "local-pv-provisioner"))
	h.leasesOfNodes(agent)
	h.touches(agent, func(name, node string) *corev1.PersistentVolume {
		return volumeOfNode(name, corev1.LabelHostname, node, corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: "/dev/disk/none"}})
	})
	h.withoutVolumes(nodeA, nodeB)
	t.Run("nodes", func(t *testing.T) { // ends when all of them have
		for node, kinds := range map[string][]string{nodeA: {"block", "xfs"}, nodeB: {"ext4", "btrfs"}} {
			t.Run(node, func(t *testing.T) {
				t.Parallel()
				h := &harness{t, h.namespace}
				for _, kind := range kinds {
					h.useDevice(node, kind)
				}
			})
		}
	})
}

// withoutVolumes has nodes without devices at the end, as they were.
func (h *harness) withoutVolumes(nodes ...string) {
	h.Cleanup(func() {
		for _, node := range nodes {
			h.annotate(node, "null")
			for _, pv := range h.volumesOn(node) {
				_ = c.Client.CoreV1().PersistentVolumes().Delete(context.Background(), pv, metav1.DeleteOptions{})
			}
		}
	})
}

func (h *harness) volumesOn(node string) (names []string) {
	list, err := c.Client.CoreV1().PersistentVolumes().List(context.Background(), metav1.ListOptions{LabelSelector: legacyLabel + "=" + node})
	must.Succeed(h, err)
	for _, pv := range list.Items {
		names = append(names, pv.Name)
	}
	return names
}

// useDevice has a pod use a device of a node: kind is the filesystem, or block.
func (h *harness) useDevice(node, kind string) {
	data := map[string]string{"volumeMode": "Filesystem", "fsType": kind, "wipe": "zero"}
	claim, use := "claim-"+kind, with("claim-"+kind, "/data")
	changes := []func(*corev1.PersistentVolumeClaim){ofLocalStorage}
	script := "echo a-secret >/data/file && sync -f /data"
	if kind == "block" {
		data = map[string]string{"volumeMode": "Block", "wipe": "zero"}
		use = withDevice(claim, "/dev/disk")
		changes = append(changes, asBlock)
		script = "echo a-secret | dd of=/dev/disk bs=1M seek=150 conv=notrunc,fsync"
	}
	disk := h.addDisk(node, "disk-"+kind, 320*mib)
	h.offer(node, data)
	pv := h.deviceVolumes(node, corev1.VolumeAvailable, 1)[0]
	if pv.Name != "local-"+node+"-disk-"+kind || pv.Spec.Capacity.Storage().Value() != 320*mib || len(pv.OwnerReferences) != 1 {
		h.Errorf("the volume is %s of %s, owned by %v", pv.Name, pv.Spec.Capacity.Storage(), pv.OwnerReferences)
	}
	h.claim(claim, "100Mi", changes...)
	h.pod(claim, use, on(node))
	h.ready(claim)
	h.mustRun(claim, script)
	h.deviceVolumes(node, corev1.VolumeBound, 1)
	h.remove(claim)
	h.releaseDevice(claim)
	h.untilOfferedAgain(pv)
	h.wantNothingOn(disk)
	// The next kind begins without any.
	must.Succeed(h, os.Remove(filepath.Join(disks(node), "disk-"+kind)))
	must.Succeed(h, c.Client.CoreV1().PersistentVolumes().Delete(h.Context(), pv.Name, metav1.DeleteOptions{}))
	h.until("the volume to be gone", func(context.Context) (string, error) {
		return strings.Join(h.volumesOn(node), ", "), nil
	})
}

// releaseDevice deletes a claim.
func (h *harness) releaseDevice(claim string) {
	h.Helper()
	must.Succeed(h, c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Delete(h.Context(), claim, metav1.DeleteOptions{}))
}

// untilOfferedAgain waits until a volume has been made anew.
func (h *harness) untilOfferedAgain(old corev1.PersistentVolume) {
	h.Helper()
	h.until("the volume "+old.Name+" to be offered again", func(ctx context.Context) (string, error) {
		now, err := c.Client.CoreV1().PersistentVolumes().Get(ctx, old.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "deleted", nil
		}
		if err != nil || now.UID != old.UID && now.Status.Phase == corev1.VolumeAvailable {
			return "", err
		}
		return string(now.Status.Phase), nil
	})
}

func (h *harness) wantNothingOn(disk string) {
	h.Helper()
	content, err := os.ReadFile(disk)
	must.Succeed(h, err)
	if left := strings.Trim(string(content), "\x00"); left != "" {
		h.Errorf("%d bytes of the disk can still be read", len(left))
	}
}

// upstreamVolume is what the upstream program makes of a disk: createPV of controllers/device_detector.go in local-pv-provisioner 0.5.3 of
// cybozu/neco-containers.
func (h *harness) upstreamVolume(node, disk string, bytes int64) *corev1.PersistentVolume {
	h.Helper()
	owner, err := c.Client.CoreV1().Nodes().Get(h.Context(), node, metav1.GetOptions{})
	must.Succeed(h, err)
	const prefix = "local-pv-provisioner.cybozu.io/"
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name:   "local-" + node + "-" + disk,
			Labels: map[string]string{legacyLabel: node, prefix + "node": node},
			Annotations: map[string]string{
				prefix + "storageClassName": "local-storage", prefix + "volumeMode": "Block", prefix + "deviceDir": disks(node), prefix + "deviceNameFilter": "^disk",
			},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node, UID: owner.UID, Controller: pointer(true), BlockOwnerDeletion: pointer(true)}},
		},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:    corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(bytes, resource.BinarySI)},
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			StorageClassName: "local-storage", VolumeMode: pointer(corev1.PersistentVolumeBlock),
			PersistentVolumeSource: corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: filepath.Join(disks(node), disk)}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}}}}},
		},
	}
}

// The volumes of the upstream program are taken over as they are but for the identities of their devices, one in use and one that an early version made, and again
// by the next version of the agent. The pod that uses one does not notice.
func TestDevicesOfUpstream(t *testing.T) {
	h := begin(t)
	const bytes = 160 * mib
	disk := h.addDisk(nodeB, "disk-used", bytes)
	h.addDisk(nodeB, "disk-early", bytes)
	used, early := h.upstreamVolume(nodeB, "disk-used", bytes), h.upstreamVolume(nodeB, "disk-early", bytes)
	delete(early.Labels, "local-pv-provisioner.cybozu.io/node")
	delete(early.Annotations, "local-pv-provisioner.cybozu.io/storageClassName")
	volumes := c.Client.CoreV1().PersistentVolumes()
	for _, pv := range []*corev1.PersistentVolume{used, early} {
		_, err := volumes.Create(h.Context(), pv, metav1.CreateOptions{})
		must.Succeed(h, err)
	}
	h.claim("used", "1Mi", ofLocalStorage, asBlock, func(claim *corev1.PersistentVolumeClaim) { claim.Spec.VolumeName = used.Name })
	h.pod("user", withDevice("used", "/dev/disk"))
	h.ready("user")
	h.mustRun("user", "echo from before | dd of=/dev/disk bs=1M seek=120 conv=notrunc,fsync")
	before, err := volumes.Get(h.Context(), used.Name, metav1.GetOptions{})
	must.Succeed(h, err)

	h.installDevices()
	h.withoutVolumes(nodeB)
	h.offer(nodeB, map[string]string{"volumeMode": "Block", "wipe": "zero"})
	h.addDisk(nodeB, "disk-0", 8*mib)
	h.deviceVolumes(nodeB, corev1.VolumeAvailable, 2) // it has seen the others
	for _, command := range []string{"restart", "status"} {
		_, err := c.Kubectl(h.Context(), "--namespace="+devicesNamespace, "rollout", command, "daemonset/local-pv-provisioner")
		must.Succeed(h, err)
	}
	after, err := volumes.Get(h.Context(), used.Name, metav1.GetOptions{})
	must.Succeed(h, err)
	if _, said := after.Annotations[deviceIdentity]; !said {
		h.Errorf("the volume in use says nothing of the identity of its device: %v", after.Annotations)
	}
	if diff := cmp.Diff(before.Spec, after.Spec); diff != "" || after.UID != before.UID || after.Status.Phase != corev1.VolumeBound {
		h.Errorf("the volume in use is %s and was changed (-before +after):\n%s", after.Status.Phase, diff)
	}
	if got := h.mustRun("user", "dd if=/dev/disk bs=1M skip=120 count=1 2>&- | head -c 11"); got != "from before" {
		h.Errorf("the pod reads %q", got)
	}
	if pod := h.ready("user"); pod.Status.ContainerStatuses[0].RestartCount > 0 {
		h.Error("the pod was restarted")
	}
	h.remove("user")
	h.releaseDevice("used")
	h.untilOfferedAgain(*after)
	h.wantNothingOn(disk)
}
