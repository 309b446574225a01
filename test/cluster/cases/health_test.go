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
	s := begin(t)
	for _, name := range []string{"lost", "well"} {
		s.claim(name, "64Mi")
		s.pod(name, with(name, "/data"), on(nodeA))
	}
	s.ready("lost")
	s.ready("well")
	s.mustRun("lost", "echo hello >/data/file")

	path := s.disk(s.volume("lost"))
	// No name of a volume, so that it is none meanwhile.
	away := filepath.Join(filepath.Dir(path), ".away")
	s.rename(path, away)
	t.Cleanup(func() {
		if _, err := os.Lstat(away); err == nil {
			s.rename(away, path)
		}
	})
	want := health.Facts{Volume: filepath.Base(path), Missing: true}.Condition().Message
	s.wantEvent("PersistentVolumeClaim", "lost", "VolumeConditionAbnormal", want)

	s.rename(away, path)
	s.wantEvent("PersistentVolumeClaim", "lost", "VolumeConditionNormal")
	if got := s.mustRun("lost", "cat /data/file"); got != "hello\n" {
		t.Errorf("the volume that is back holds %q", got)
	}
	// Nothing is said of others, and nothing said twice.
	events, err := c.Client.CoreV1().Events(s.namespace).List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.kind=PersistentVolumeClaim"})
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

func (s *scene) rename(from, to string) {
	s.Helper()
	must.Succeed(s, os.Rename(from, to))
}
