package cases_test

import (
	"os"
	"path/filepath"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// What the driver says of a volume reaches who has the claim: that it is lost, and that it
// is back. A stand-in for the health monitor makes the events of it.
func TestLostVolumeIsReportedOnClaim(t *testing.T) {
	h := begin(t)
	for _, name := range []string{"lost", "well"} {
		h.claim(name, "64Mi")
		h.pod(name, with(name, "/data"), on(nodeA))
	}
	h.ready("lost")
	h.ready("well")
	h.mustRun("lost", "echo hello >/data/file")

	path := h.disk(h.volume("lost"))
	// No name of a volume, so that it is none meanwhile.
	away := filepath.Join(filepath.Dir(path), ".away")
	h.rename(path, away)
	t.Cleanup(func() {
		if _, err := os.Lstat(away); err == nil {
			h.rename(away, path)
		}
	})
	want := health.Facts{Volume: filepath.Base(path), Missing: true}.Condition().Message
	h.wantEvent("PersistentVolumeClaim", "lost", "VolumeConditionAbnormal", want)

	h.rename(away, path)
	h.wantEvent("PersistentVolumeClaim", "lost", "VolumeConditionNormal")
	if got := h.mustRun("lost", "cat /data/file"); got != "hello\n" {
		t.Errorf("the volume that is back holds %q", got)
	}
	// Nothing is said of others, and nothing said twice.
	events, err := c.Client.CoreV1().Events(h.namespace).List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.kind=PersistentVolumeClaim"})
	must.Succeed(t, err)
	got := map[string]int{}
	for _, e := range events.Items {
		if e.Source.Component == "csi-pv-monitor-controller-"+cluster.DriverName {
			got[e.InvolvedObject.Name+" "+e.Type+" "+e.Reason]++
		}
	}
	if len(got) != 2 || got["lost Warning VolumeConditionAbnormal"] != 1 || got["lost Normal VolumeConditionNormal"] != 1 {
		t.Errorf("the events are %v", got)
	}
}

func (h *harness) rename(from, to string) {
	h.Helper()
	must.Succeed(h, os.Rename(from, to))
}
