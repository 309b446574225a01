package operator

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Snapshots keep a volume where it is, whether the API server knows of them or the driver alone. Left behind they stay as they are where they
// were made, and volumes are made from them there.
func TestSnapshotsAreLeftBehind(t *testing.T) {
	c := newCluster(t, "")
	source, target := c.nodes[nodeA], c.nodes[nodeB]
	c.begin(corev1.PersistentVolumeReclaimDelete)
	pod := appPod()
	c.has(pod)
	in := func(name string) string { return filepath.Join(source.Target(podName(pod)), name) }
	must.Succeed(t, os.WriteFile(in("before"), []byte("content"), 0o600))
	snapshot := must.Value(source.Snapshot(t.Context(), "s-1", c.volume.ID, ""))(t)
	source.pool.Snapshots = []string{"s-1"}
	must.Succeed(t, os.WriteFile(in("after"), []byte("content"), 0o600))

	content := &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"name": "content"},
		"spec":     map[string]any{"driver": render.DriverName, "source": map[string]any{"volumeHandle": c.volume.ID}},
	}}
	content.SetGroupVersionKind(place.SnapshotContent)
	must.Succeed(t, c.api.Create(t.Context(), content))
	c.waits("move with snapshots: LeaveBehind", v1alpha1.Pending)
	c.delete(content)
	refused := false
	c.run(func() {
		if strings.Contains(c.says(), "delete them, or have them left behind") {
			refused = true
			deleteMove(c)
		}
	})
	if !refused || !c.isRunning() {
		t.Fatalf("a volume with snapshots was moved\n%s", c.output())
	}
	c.wantNothingMade()
	c.wantVolume(nodeA, podName(pod))

	m := c.moveObject()
	m.UID, m.Spec.Snapshots = "another", v1alpha1.LeaveSnapshots
	must.Succeed(t, c.api.Create(t.Context(), m))
	c.run(func() {})
	c.until("the pod runs", c.isRunning)
	if c.has(m); m.Status.Phase != v1alpha1.Succeeded {
		t.Fatalf("the move is %+v\n%s", m.Status, c.output())
	}
	pod = appPod()
	c.has(pod)
	c.wantVolume(nodeB, podName(pod))
	moved := filepath.Join(target.Target(podName(pod)), "after")
	must.Succeed(t, must.Err(os.Stat(moved)))
	if all := must.Value(target.Snapshots(t.Context(), ""))(t); len(all) > 0 {
		t.Errorf("the target has the snapshots %v", all)
	}

	restored := drivertest.Volume{ID: "restored", Bytes: c.volume.Bytes}
	must.Value(source.Restore(t.Context(), restored, snapshot.GetSnapshotId()))(t)
	must.Succeed(t, source.Publish(t.Context(), restored, "restored"))
	in = func(name string) string { return filepath.Join(source.Target("restored"), name) }
	_, err := os.Stat(in("after"))
	if got := must.Value(os.ReadFile(in("before")))(t); string(got) != "content" || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what was restored is not as of the snapshot: %q, %v", got, err)
	}
	must.Succeed(t, source.Unpublish(t.Context(), restored.ID, "restored"), source.Delete(t.Context(), restored.ID),
		source.DeleteSnapshot(t.Context(), snapshot.GetSnapshotId()))
	source.pool.Snapshots = nil
	c.end()
}
