package cases_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/test/cluster/audit"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

const (
	devicesNamespace = "local-pv-provisioner"
	configAnnotation = "local-pv-provisioner.cybozu.io/pv-spec-configmap"
	legacyLabel      = "local-pv-provisioner.cybozu.com/node"
)

// disks is where the disks of a node are: links to loop devices that the test has made, and nothing else.
func disks(node string) string { return filepath.Join(c.Sandbox.Dir, "disks", node) }

// installDevices installs deploy/devices with the directory of the disks.
func (s *scene) installDevices() {
	s.Helper()
	for _, n := range c.Nodes {
		must(s, os.MkdirAll(disks(n.Name), 0o755))
		must(s, n.Import(s.Context(), filepath.Join(c.Programs, "local-pv-provisioner.tar")))
	}
	base, err := filepath.Abs("../../../deploy/devices")
	must(s, err)
	overlay := s.TempDir()
	relative, err := filepath.Rel(overlay, base)
	must(s, err)
	must(s, os.WriteFile(filepath.Join(overlay, "kustomization.yaml"), fmt.Appendf(nil, `
resources: [%q]
images: [{name: quay.io/kubevirt/local-pv-provisioner, newName: localhost/local-pv-provisioner, newTag: test}]
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
            volumeMounts: [{name: disks, mountPath: %[2]q, readOnly: true}]
          volumes:
          - {name: disks, hostPath: {path: %[2]q, type: Directory}}
          - {name: records, hostPath: {path: /run/containerd/devices, type: DirectoryOrCreate}}
`, relative, filepath.Join(c.Sandbox.Dir, "disks")), 0o600))
	_, err = c.Kubectl(s.Context(), "apply", "-k", overlay)
	must(s, err)
	s.Cleanup(func() {
		if _, err := c.Kubectl(context.Background(), "delete", "-k", overlay, "--timeout=1m"); err != nil {
			s.Error(err)
		}
	})
	s.until("the provisioner on every node", func(ctx context.Context) (string, error) {
		set, err := c.Client.AppsV1().DaemonSets(devicesNamespace).Get(ctx, "local-pv-provisioner", metav1.GetOptions{})
		if err != nil || int(set.Status.NumberReady) == len(c.Nodes) {
			return "", err
		}
		return fmt.Sprintf("%d of %d", set.Status.NumberReady, len(c.Nodes)), nil
	})
}

// addDisk gives a node a disk, and answers its device.
func (s *scene) addDisk(node, name string, bytes int64) string {
	s.Helper()
	image := filepath.Join(s.TempDir(), name)
	must(s, os.WriteFile(image, nil, 0o600))
	must(s, os.Truncate(image, bytes))
	device, err := loopfs.Attach(image)
	must(s, err)
	s.Cleanup(func() { device.Close() })
	must(s, os.Symlink(device.Name(), filepath.Join(disks(node), name)))
	s.Cleanup(func() { os.Remove(filepath.Join(disks(node), name)) })
	return device.Name()
}

// offer annotates a node with a configuration.
func (s *scene) offer(node string, data map[string]string) {
	s.Helper()
	data["deviceDir"], data["deviceNameFilter"] = disks(node), "^disk"
	name := "devices-" + node
	maps := c.Client.CoreV1().ConfigMaps(devicesNamespace)
	_ = maps.Delete(s.Context(), name, metav1.DeleteOptions{}) // there may be none yet
	_, err := maps.Create(s.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: data}, metav1.CreateOptions{})
	must(s, err)
	s.annotate(node, fmt.Sprintf("%q", name))
}

func (s *scene) annotate(node, value string) {
	s.Helper()
	s.annotateWith(node, configAnnotation, value)
}

func (s *scene) annotateWith(node, key, value string) {
	s.Helper()
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%s}}}`, key, value)
	_, err := c.Client.CoreV1().Nodes().Patch(context.Background(), node, types.MergePatchType, patch, metav1.PatchOptions{})
	must(s, err)
}

// localVolumes waits until a node has so many volumes in a phase, and answers them.
func (s *scene) deviceVolumes(node string, phase corev1.PersistentVolumePhase, want int) []corev1.PersistentVolume {
	s.Helper()
	var found []corev1.PersistentVolume
	s.until(fmt.Sprintf("%d volumes of %s to be %s", want, node, phase), func(ctx context.Context) (string, error) {
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

// Devices are offered, used, cleaned and offered again, in each way that a volume can be used.
func TestDevices(t *testing.T) {
	s := begin(t)
	s.installDevices()
	t.Cleanup(func() {
		for _, node := range []string{nodeA, nodeB} {
			s.annotate(node, "null")
			for _, pv := range s.volumesOn(node) {
				_ = c.Client.CoreV1().PersistentVolumes().Delete(context.Background(), pv, metav1.DeleteOptions{})
			}
		}
	})
	for _, fsType := range []string{"", "ext4", "xfs", "btrfs"} {
		data := map[string]string{"volumeMode": "Block", "wipe": "zero"}
		if fsType != "" {
			data = map[string]string{"volumeMode": "Filesystem", "fsType": fsType, "wipe": "zero"}
		}
		s.useDevice(data, fsType)
	}
}

func (s *scene) volumesOn(node string) (names []string) {
	list, err := c.Client.CoreV1().PersistentVolumes().List(context.Background(), metav1.ListOptions{LabelSelector: legacyLabel + "=" + node})
	must(s, err)
	for _, pv := range list.Items {
		names = append(names, pv.Name)
	}
	return names
}

func (s *scene) useDevice(data map[string]string, fsType string) {
	kind := fsType
	if kind == "" {
		kind = "block"
	}
	disk := s.addDisk(nodeA, "disk-"+kind, 320*mib)
	s.offer(nodeA, data)
	pv := s.deviceVolumes(nodeA, corev1.VolumeAvailable, 1)[0]
	if pv.Name != "local-"+nodeA+"-disk-"+kind || pv.Spec.Capacity.Storage().Value() != 320*mib || len(pv.OwnerReferences) != 1 {
		s.Errorf("the volume is %s of %s, owned by %v", pv.Name, pv.Spec.Capacity.Storage(), pv.OwnerReferences)
	}
	claim := "claim-" + kind
	if fsType == "" {
		s.claim(claim, "100Mi", ofLocalStorage, asBlock)
		s.pod(claim, withDevice(claim, "/dev/disk"))
	} else {
		s.claim(claim, "100Mi", ofLocalStorage)
		s.pod(claim, with(claim, "/data"))
	}
	s.ready(claim)
	if fsType == "" {
		s.mustRun(claim, "echo a-secret | dd of=/dev/disk bs=1M seek=150 conv=notrunc,fsync")
	} else {
		s.mustRun(claim, "echo a-secret >/data/file && sync")
	}
	s.deviceVolumes(nodeA, corev1.VolumeBound, 1)
	s.remove(claim)
	must(s, c.Client.CoreV1().PersistentVolumeClaims(s.namespace).Delete(s.Context(), claim, metav1.DeleteOptions{}))
	old := pv.UID
	s.until("the volume to be offered again", func(ctx context.Context) (string, error) {
		now, err := c.Client.CoreV1().PersistentVolumes().Get(ctx, pv.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return "deleted", nil
		}
		if err != nil || now.UID != old && now.Status.Phase == corev1.VolumeAvailable {
			return "", err
		}
		return string(now.Status.Phase), nil
	})
	content, err := os.ReadFile(disk)
	must(s, err)
	if left := strings.Trim(string(content), "\x00"); left != "" {
		s.Errorf("%s: %d bytes of the disk can still be read", kind, len(left))
	}
	// The next kind begins without any.
	must(s, os.Remove(filepath.Join(disks(nodeA), "disk-"+kind)))
	must(s, c.Client.CoreV1().PersistentVolumes().Delete(s.Context(), pv.Name, metav1.DeleteOptions{}))
	s.until("the volume to be gone", func(context.Context) (string, error) {
		return strings.Join(s.volumesOn(nodeA), ", "), nil
	})
}

// A new disk is a volume within two seconds, and one with a filesystem on it is kept.
func TestNewDevices(t *testing.T) {
	s := begin(t)
	s.installDevices()
	t.Cleanup(func() {
		s.annotate(nodeB, "null")
		for _, pv := range s.volumesOn(nodeB) {
			_ = c.Client.CoreV1().PersistentVolumes().Delete(context.Background(), pv, metav1.DeleteOptions{})
		}
	})
	// As the upstream program made it.
	size := int64(64 * mib)
	s.addDisk(nodeB, "disk-old", size)
	mode := corev1.PersistentVolumeBlock
	_, err := c.Client.CoreV1().PersistentVolumes().Create(t.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "local-" + nodeB + "-disk-old", Labels: map[string]string{legacyLabel: nodeB},
			Annotations: map[string]string{
				"local-pv-provisioner.cybozu.io/volumeMode": "Block", "local-pv-provisioner.cybozu.io/deviceDir": disks(nodeB),
				"local-pv-provisioner.cybozu.io/deviceNameFilter": "^disk",
			}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:    corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(size, resource.BinarySI)},
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			StorageClassName: "local-storage", VolumeMode: &mode,
			PersistentVolumeSource: corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: filepath.Join(disks(nodeB), "disk-old")}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{nodeB}}}}}}},
		},
	}, metav1.CreateOptions{})
	must(s, err)
	s.offer(nodeB, map[string]string{"volumeMode": "Block"})
	s.deviceVolumes(nodeB, corev1.VolumeAvailable, 1)
	s.addDisk(nodeB, "disk-0", 64*mib)
	s.deviceVolumes(nodeB, corev1.VolumeAvailable, 2)

	began := time.Now()
	s.addDisk(nodeB, "disk-1", 64*mib)
	s.deviceVolumes(nodeB, corev1.VolumeAvailable, 3)
	c.Log.Printf("a new device was a volume after %s", time.Since(began))
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("a new device was a volume after %s, want 2 s", took)
	}
	s.wantNoRequests("local-pv-provisioner/local-pv-provisioner")
}

// wantNoRequests says that a program asks the API server for nothing, watches apart, while nothing that it takes part in
// changes.
func (s *scene) wantNoRequests(account string) {
	s.Helper()
	requests := func() (own []audit.Request) {
		all, err := audit.Requests(audit.Path(c.Logs))
		must(s, err)
		return slices.DeleteFunc(all, func(r audit.Request) bool { return r.Account != account || r.Verb == "watch" })
	}
	before := requests()
	s.until("the requests of "+account+" to end", func(context.Context) (string, error) {
		last := before
		before = requests()
		if len(before) != len(last) {
			return fmt.Sprintf("%d requests", len(before)), nil
		}
		return "", nil
	})
	for range 5 {
		s.annotateWith(nodeB, "example.com/tick", fmt.Sprintf("%q", time.Now().Format(time.RFC3339Nano)))
	}
	s.until("time to pass in which nothing happens", quietFor(5*time.Second))
	if after := requests(); len(after) > len(before) {
		s.Errorf("%s sent requests in a steady state: %v", account, after[len(before):])
	}
	c.Log.Printf("%s sent %d requests in all, %d of them writes, from %d nodes", account, len(before), len(audit.Writes(before)), len(c.Nodes))
}

func must(s interface {
	Helper()
	Fatal(...any)
}, err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}
