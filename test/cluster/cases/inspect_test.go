package cases_test

import (
	"encoding/json"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/cluster"
)

// aReport is the part of inspect's document that is checked here.
type aReport struct {
	Node  string `json:"node"`
	Pools []struct {
		Volumes []struct {
			ID        string `json:"id"`
			Abnormal  bool   `json:"abnormal"`
			Published []struct {
				Path string `json:"path"`
			} `json:"published"`
		} `json:"volumes"`
	} `json:"pools"`
}

// What a person types first: in the driver's container, which has no shell, without a
// word on the pools.
func TestInspectInDriverContainer(t *testing.T) {
	s := begin(t)
	s.claim("inspected", "64Mi")
	s.pod("inspected", with("inspected", "/data"), on(nodeA))
	user := s.ready("inspected")
	handle := s.volume("inspected").Spec.CSI.VolumeHandle
	seen := 0
	for _, pod := range s.driverPods() {
		out, err := s.exec(cluster.Namespace, pod, "driver", "/hostpath-csi-driver", "inspect", "--output=json")
		var report aReport
		if jsonErr := json.Unmarshal([]byte(out), &report); jsonErr != nil {
			t.Fatalf("inspect in %s: %v, %v:\n%s", pod, err, jsonErr, out)
		}
		if err != nil {
			t.Errorf("inspect in %s: %v:\n%s", pod, err, out)
		}
		for _, p := range report.Pools {
			for _, v := range p.Volumes {
				if v.ID != handle {
					continue
				}
				seen++
				if report.Node != nodeA || v.Abnormal || len(v.Published) != 1 || !strings.Contains(v.Published[0].Path, string(user.UID)) {
					t.Errorf("%s sees the volume as %+v, want it in order, on %s, at the pod %s", report.Node, v, nodeA, user.UID)
				}
			}
		}
	}
	if seen != 1 {
		t.Errorf("the volume is seen %d times, want once", seen)
	}
	s.remove("inspected")
	s.removeClaim("inspected")
}
