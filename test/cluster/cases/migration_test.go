package cases_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/must"
)

const (
	migrateOverlay   = "../overlay/migrate"
	migrateNamespace = "hostpath-migrate"
)

// migrate runs the command on a node, as docs/migration.md has it, and returns what it says.
func (h *harness) migrate(node string, args ...string) (string, error) {
	h.Helper()
	pods, err := c.Client.CoreV1().Pods(migrateNamespace).List(h.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil || len(pods.Items) != 1 {
		h.Fatalf("%d pods on %s (%v)", len(pods.Items), node, err)
	}
	return h.exec(migrateNamespace, pods.Items[0].Name, "", append([]string{"/hostpath-provisioner", "migrate"}, args...)...)
}

func (h *harness) mustMigrate(node string, args ...string) string {
	h.Helper()
	out, err := h.migrate(node, args...)
	if err != nil {
		h.Fatalf("%q: %v\n%s", args, err, out)
	}
	return out
}

// migrateStepwise ends the process after each step, and starts it again until nothing is left to do.
func (h *harness) migrateStepwise(node string, args ...string) (runs int) {
	h.Helper()
	for runs = 1; ; runs++ {
		if out := h.mustMigrate(node, append(args, "--apply", "--steps=1")...); !strings.Contains(out, "stopped after") {
			return runs
		}
		if runs > 20 {
			h.Fatal("no end")
		}
	}
}

// wrote has a new pod append a line to a file of the claim, and returns the file.
func (h *harness) wrote(claim, line string) string {
	h.Helper()
	h.pod("writer", with(claim, "/data"))
	h.ready("writer")
	out := h.mustRun("writer", "echo "+line+" >>/data/file; cat /data/file")
	h.remove("writer")
	return out
}

func labelled(claim *corev1.PersistentVolumeClaim) {
	claim.Labels = map[string]string{"app": "db"}
	claim.Annotations = map[string]string{"example.com/note": "stays"}
}

func TestMigrationToCSI(t *testing.T) {
	h := begin(t)
	h.install(perNode)
	h.apply("-k", migrateOverlay)
	h.provisioners(form{namespace: migrateNamespace}, len(c.Nodes), true)
	h.provisioners(perNode, len(c.Nodes), true)

	owner, err := c.Client.CoreV1().ConfigMaps(h.namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "owner"}}, metav1.CreateOptions{})
	must.Succeed(h, err)
	owners := []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: owner.Name, UID: owner.UID}}
	h.claim("data", "10Mi", ofClass("hostpath-provisioner"), labelled, func(claim *corev1.PersistentVolumeClaim) { claim.OwnerReferences = owners })
	h.pod("user", with("data", "/data"))
	h.ready("user")
	h.mustRun("user", "echo before >/data/file")
	old, node, directory := h.hostPath("data")
	args := []string{"--claim=" + h.namespace + "/data"}
	if out, err := h.migrate(node, append(args, "--apply")...); err == nil || !strings.Contains(out, "in use by pod user") {
		t.Fatalf("%v\n%s", err, out)
	}
	h.remove("user")
	if out := h.mustMigrate(node, args...); !strings.Contains(out, "rename "+old.Spec.HostPath.Path+" to /var/plain/"+old.Name) {
		t.Error(out)
	}

	t.Logf("migrated in %d runs", h.migrateStepwise(node, args...))
	h.wantMigrated(old, owners)
	h.wantGone(directory)
	if got := h.wrote("data", "between"); got != "before\nbetween\n" {
		t.Errorf("the pod reads %q", got)
	}

	// Back, and there again, in one run each.
	h.mustMigrate(node, append(args, "--undo", "--apply")...)
	if back, at, path := h.hostPath("data"); back.Spec.HostPath.Path != old.Spec.HostPath.Path || at != node || path != directory {
		t.Errorf("PersistentVolume %+v", back.Spec)
	}
	if got := h.wrote("data", "after"); got != "before\nbetween\nafter\n" {
		t.Errorf("the pod reads %q", got)
	}
	h.mustMigrate(node, append(args, "--apply")...)
	h.servesMigrated("before\nbetween\nafter\n")
}

// wantMigrated expects the claim to be as it was, with a volume of the driver.
func (h *harness) wantMigrated(old *corev1.PersistentVolume, owners []metav1.OwnerReference) {
	h.Helper()
	now := h.volume("data")
	if now.Spec.CSI == nil || now.Spec.CSI.VolumeHandle != old.Name || now.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
		h.Errorf("PersistentVolume %+v", now.Spec)
	}
	claim, err := c.Client.CoreV1().PersistentVolumeClaims(h.namespace).Get(h.Context(), "data", metav1.GetOptions{})
	sameOwners := slices.EqualFunc(claim.OwnerReferences, owners, func(a, b metav1.OwnerReference) bool { return a.UID == b.UID })
	if err != nil || !sameOwners || claim.Labels["app"] != "db" || claim.Annotations["example.com/note"] != "stays" || *claim.Spec.StorageClassName != "hostpath-csi-plain" {
		h.Errorf("claim %+v (%v)", claim, err)
	}
}

// servesMigrated has the volume do what volumes of the driver can, which deletes it at last.
func (h *harness) servesMigrated(content string) {
	h.Helper()
	h.pod("user", with("data", "/data"))
	h.ready("user")
	if got := h.mustRun("user", "cat /data/file"); got != content {
		h.Errorf("the pod reads %q", got)
	}
	h.resize("data", "20Mi")
	h.wantClaimSize("data", "20Mi")
	h.remove("user")
	h.removeClaim("data")
}

// oldVolume is a directory of a node as a provisioner from before CSI has made it for a claim: an empty one, whose name
// begins with that of its PersistentVolume. They are Provision of cmd/provisioner/hostpath-provisioner.go in kubevirt/hostpath-provisioner v0.25.2, whose
// capacity is that of the disk, and provisionFor of provisioner.go in rancher/local-path-provisioner v0.0.36, with a pathPattern that gives this name.
func (h *harness) oldVolume(node, provisioner, source, path, claim string) {
	h.Helper()
	name, _, _ := strings.Cut(filepath.Base(path), "_")
	disk := c.Nodes[node].Disk(path)
	must.Succeed(h, os.MkdirAll(disk, 0o777))
	must.Succeed(h, os.Chmod(disk, 0o777))
	of := map[string]struct{ annotations, capacity string }{
		"kubevirt.io/hostpath-provisioner": {"hostPathProvisionerIdentity: kubevirt.io/hostpath-provisioner, kubevirt.io/provisionOnNode: " + node, "8Gi"},
		"rancher.io/local-path":            {"local.path.provisioner/selected-node: " + node, "10Mi"},
	}[provisioner]
	h.applyText(fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolume
metadata:
  name: %[1]s
  annotations: {pv.kubernetes.io/provisioned-by: %[2]s, %[8]s}
spec:
  capacity: {storage: %[9]s}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Delete
  storageClassName: old-volumes
  %[3]s: {path: %[4]s}
  claimRef: {apiVersion: v1, kind: PersistentVolumeClaim, namespace: %[5]s, name: %[6]s}
  nodeAffinity:
    required:
      nodeSelectorTerms:
      - matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [%[7]s]}]
`, name, provisioner, source, path, h.namespace, claim, node, of.annotations, of.capacity))
	h.claim(claim, "10Mi", ofClass("old-volumes"))
	h.bound(claim)
}
