package cases_test

import (
	"cmp"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// An old volume is one that the upstream driver of kubevirt/hostpath-provisioner v0.25.2 has left.
type old struct {
	claim, node, class, pool, handle string
	request                          string // of the claim; 1Gi if empty
}

// make makes a directory in the pool as createVolumeDirectoryFunc of its pkg/hostpath/utils.go does in a container with the usual umask, and a
// PersistentVolume that carries its name, as the csi-provisioner v3.4.1 makes it which its operator deploys, of the capacity of the disk.
func (o old) make(h *harness) *corev1.PersistentVolume {
	h.Helper()
	dir := filepath.Join(c.Nodes[o.node].Disk(pathOf(o.class)), o.handle)
	must.Succeed(h, os.Mkdir(dir, 0o755))
	h.Cleanup(func() { os.RemoveAll(dir) })
	// Not what the umask leaves of it.
	must.Succeed(h, os.Chmod(dir, 0o755))
	must.Succeed(h, os.WriteFile(filepath.Join(dir, "file"), []byte("from before\n"), 0o644))
	volume, err := c.Client.CoreV1().PersistentVolumes().Create(h.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name:        o.handle,
			Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": cluster.DriverName},
		},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("8Gi")},
			AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			StorageClassName:              o.class,
			ClaimRef:                      &corev1.ObjectReference{Namespace: h.namespace, Name: o.claim},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver:       cluster.DriverName,
				VolumeHandle: o.handle,
				FSType:       "xfs",
				VolumeAttributes: map[string]string{
					"csi.storage.k8s.io/pv/name":                   o.handle,
					"csi.storage.k8s.io/pvc/name":                  o.claim,
					"csi.storage.k8s.io/pvc/namespace":             h.namespace,
					"storage.kubernetes.io/csiProvisionerIdentity": "1700000000000-8081-" + cluster.DriverName + "-" + o.node,
					"storagePool": o.pool,
				},
			}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{
					{Key: "topology.hostpath.csi/node", Operator: corev1.NodeSelectorOpIn, Values: []string{o.node}},
				},
			}}}},
		},
	}, metav1.CreateOptions{})
	must.Succeed(h, err)
	h.claim(o.claim, cmp.Or(o.request, "1Gi"), ofClass(o.class), func(claim *corev1.PersistentVolumeClaim) { claim.Spec.VolumeName = volume.Name })
	return volume
}

// What the upstream driver has made is mounted, reported and deleted like what
// this one makes, each on its own.
func TestVolumesOfUpstreamDriver(t *testing.T) {
	h := begin(t)
	all := []old{
		{claim: "first", node: nodeA, class: "hostpath-csi", pool: "local", handle: "pvc-1b4e28ba-2fa1-11d2-883f-0016d3cca427"},
		{claim: "second", node: nodeB, class: "hostpath-csi", pool: "local", handle: "pvc-6fa459ea-ee8a-3ca4-894e-db77e160355e"},
		{claim: "third", node: nodeB, class: "hostpath-csi-plain", pool: "plain", handle: "pvc-16fd2706-8baf-433b-82eb-8c7fada847da"},
	}
	files := map[string]string{}
	for _, o := range all {
		files[o.claim] = filepath.Join(h.disk(o.make(h)), "file")
		h.pod(o.claim, with(o.claim, "/data"))
	}
	for _, o := range all {
		if got := h.ready(o.claim).Spec.NodeName; got != o.node {
			t.Errorf("the pod is on %s, its volume on %s", got, o.node)
		}
		if got := h.mustRun(o.claim, "cat /data/file; echo more >>/data/file"); got != "from before\n" {
			t.Errorf("the pod reads %q", got)
		}
		h.wantFile(files[o.claim], "from before\nmore\n")
		h.wantShown(o.node, o.claim, h.sizeOf(filepath.Dir(files[o.claim])))
	}
	for i, o := range all {
		h.remove(o.claim)
		h.removeClaim(o.claim)
		h.wantGone(filepath.Dir(files[o.claim]))
		for _, other := range all[i+1:] {
			h.wantFile(files[other.claim], "from before\nmore\n")
		}
	}
}

// sizeOf is that of the filesystem which a path is on.
func (h *harness) sizeOf(path string) int64 {
	h.Helper()
	var stat unix.Statfs_t
	must.Succeed(h, unix.Statfs(path, &stat))
	return int64(stat.Blocks) * stat.Bsize
}

// An administrator who takes the driver off the cluster keeps the data, and one who puts it back has
// it again. Pods that run meanwhile do not notice.
func TestReinstallKeepsVolumes(t *testing.T) {
	h := begin(t)
	all := h.writers(2)
	h.claim("data", "64Mi")
	h.pod("first", with("data", "/data"))
	h.ready("first")
	h.mustRun("first", "echo hello >/data/file")
	h.remove("first")
	path := h.disk(h.volume("data"))

	must.Succeed(t, c.Uninstall(t.Context(), kustomization))
	h.wantFile(filepath.Join(path, "file"), "hello\n")
	h.goOn(all)
	must.Succeed(t, c.Install(t.Context(), kustomization))
	h.goOn(all)
	h.wantUninterrupted(all)
	h.pod("second", with("data", "/data"))
	h.ready("second")
	if got := h.mustRun("second", "cat /data/file"); got != "hello\n" {
		t.Errorf("the second pod reads %q", got)
	}
	h.remove("second")
	h.removeClaim("data")
}
