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
func (s *scene) migrate(node string, args ...string) (string, error) {
	s.Helper()
	pods, err := c.Client.CoreV1().Pods(migrateNamespace).List(s.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil || len(pods.Items) != 1 {
		s.Fatalf("%d pods on %s (%v)", len(pods.Items), node, err)
	}
	return s.exec(migrateNamespace, pods.Items[0].Name, "", append([]string{"/hostpath-provisioner", "migrate"}, args...)...)
}

func (s *scene) mustMigrate(node string, args ...string) string {
	s.Helper()
	out, err := s.migrate(node, args...)
	if err != nil {
		s.Fatalf("%q: %v\n%s", args, err, out)
	}
	return out
}

// migrateStepwise ends the process after each step, and starts it again until nothing is left to do.
func (s *scene) migrateStepwise(node string, args ...string) (runs int) {
	s.Helper()
	for runs = 1; ; runs++ {
		if out := s.mustMigrate(node, append(args, "--apply", "--steps=1")...); !strings.Contains(out, "stopped after") {
			return runs
		}
		if runs > 20 {
			s.Fatal("no end")
		}
	}
}

// wrote has a new pod append a line to a file of the claim, and returns the file.
func (s *scene) wrote(claim, line string) string {
	s.Helper()
	s.pod("writer", with(claim, "/data"))
	s.ready("writer")
	out := s.mustRun("writer", "echo "+line+" >>/data/file; cat /data/file")
	s.remove("writer")
	return out
}

func labelled(claim *corev1.PersistentVolumeClaim) {
	claim.Labels = map[string]string{"app": "db"}
	claim.Annotations = map[string]string{"example.com/note": "stays"}
}

func TestMigrationToCSI(t *testing.T) {
	s := begin(t)
	s.install(perNode)
	s.apply("-k", migrateOverlay)
	s.provisioners(form{namespace: migrateNamespace}, len(c.Nodes), true)
	s.provisioners(perNode, len(c.Nodes), true)

	owner, err := c.Client.CoreV1().ConfigMaps(s.namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "owner"}}, metav1.CreateOptions{})
	must.Succeed(s, err)
	owners := []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: owner.Name, UID: owner.UID}}
	s.claim("data", "10Mi", ofClass("hostpath-provisioner"), labelled, func(claim *corev1.PersistentVolumeClaim) { claim.OwnerReferences = owners })
	s.pod("user", with("data", "/data"))
	s.ready("user")
	s.mustRun("user", "echo before >/data/file")
	old, node, directory := s.hostPath("data")
	args := []string{"--claim=" + s.namespace + "/data"}
	if out, err := s.migrate(node, append(args, "--apply")...); err == nil || !strings.Contains(out, "in use by pod user") {
		t.Fatalf("%v\n%s", err, out)
	}
	s.remove("user")
	if out := s.mustMigrate(node, args...); !strings.Contains(out, "rename "+old.Spec.HostPath.Path+" to /var/plain/"+old.Name) {
		t.Error(out)
	}

	t.Logf("migrated in %d runs", s.migrateStepwise(node, args...))
	s.wantMigrated(old, owners)
	s.wantGone(directory)
	if got := s.wrote("data", "between"); got != "before\nbetween\n" {
		t.Errorf("the pod reads %q", got)
	}

	// Back, and there again, in one run each.
	s.mustMigrate(node, append(args, "--undo", "--apply")...)
	if back, at, path := s.hostPath("data"); back.Spec.HostPath.Path != old.Spec.HostPath.Path || at != node || path != directory {
		t.Errorf("PersistentVolume %+v", back.Spec)
	}
	if got := s.wrote("data", "after"); got != "before\nbetween\nafter\n" {
		t.Errorf("the pod reads %q", got)
	}
	s.mustMigrate(node, append(args, "--apply")...)
	s.servesMigrated("before\nbetween\nafter\n")
}

// wantMigrated expects the claim to be as it was, with a volume of the driver.
func (s *scene) wantMigrated(old *corev1.PersistentVolume, owners []metav1.OwnerReference) {
	s.Helper()
	now := s.volume("data")
	if now.Spec.CSI == nil || now.Spec.CSI.VolumeHandle != old.Name || now.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
		s.Errorf("PersistentVolume %+v", now.Spec)
	}
	claim, err := c.Client.CoreV1().PersistentVolumeClaims(s.namespace).Get(s.Context(), "data", metav1.GetOptions{})
	sameOwners := slices.EqualFunc(claim.OwnerReferences, owners, func(a, b metav1.OwnerReference) bool { return a.UID == b.UID })
	if err != nil || !sameOwners || claim.Labels["app"] != "db" || claim.Annotations["example.com/note"] != "stays" || *claim.Spec.StorageClassName != "hostpath-csi-plain" {
		s.Errorf("claim %+v (%v)", claim, err)
	}
}

// servesMigrated has the volume do what volumes of the driver can, which deletes it at last.
func (s *scene) servesMigrated(content string) {
	s.Helper()
	s.pod("user", with("data", "/data"))
	s.ready("user")
	if got := s.mustRun("user", "cat /data/file"); got != content {
		s.Errorf("the pod reads %q", got)
	}
	s.resize("data", "20Mi")
	s.wantClaimSize("data", "20Mi")
	s.remove("user")
	s.removeClaim("data")
}

// oldVolume is a directory of a node as a provisioner from before CSI has made it for a claim: an empty one, whose name
// begins with that of its PersistentVolume. They are Provision of cmd/provisioner/hostpath-provisioner.go in kubevirt/hostpath-provisioner v0.25.2, whose
// capacity is that of the disk, and provisionFor of provisioner.go in rancher/local-path-provisioner v0.0.36, with a pathPattern that gives this name.
func (s *scene) oldVolume(node, provisioner, source, path, claim string) {
	s.Helper()
	name, _, _ := strings.Cut(filepath.Base(path), "_")
	disk := c.Nodes[node].Disk(path)
	must.Succeed(s, os.MkdirAll(disk, 0o777))
	must.Succeed(s, os.Chmod(disk, 0o777))
	of := map[string]struct{ annotations, capacity string }{
		"kubevirt.io/hostpath-provisioner": {"hostPathProvisionerIdentity: kubevirt.io/hostpath-provisioner, kubevirt.io/provisionOnNode: " + node, "8Gi"},
		"rancher.io/local-path":            {"local.path.provisioner/selected-node: " + node, "10Mi"},
	}[provisioner]
	s.applyText(fmt.Sprintf(`
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
`, name, provisioner, source, path, s.namespace, claim, node, of.annotations, of.capacity))
	s.claim(claim, "10Mi", ofClass("old-volumes"))
	s.bound(claim)
}
