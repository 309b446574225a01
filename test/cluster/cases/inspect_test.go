package cases_test

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
	h := begin(t)
	h.claim("inspected", "64Mi")
	h.pod("inspected", with("inspected", "/data"), on(nodeA))
	user := h.ready("inspected")
	handle := h.volume("inspected").Spec.CSI.VolumeHandle
	seen := 0
	for _, pod := range h.driverPods() {
		out, err := h.exec(cluster.Namespace, pod, "driver", "/hostpath-csi-driver", "inspect", "--output=json")
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
	h.wantInPlugin("inspected", handle)
	h.remove("inspected")
	h.removeClaim("inspected")
}

// wantInPlugin has kubectl hostpath, which kubectl finds in the PATH, show a claim on nodeA and the pools of both nodes.
func (h *harness) wantInPlugin(claim, handle string) {
	h.Helper()
	var volumes []struct{ Namespace, Claim, ID, Node, Condition string }
	h.plugin(&volumes, "volumes")
	found := 0
	for _, v := range volumes {
		if v.Namespace == h.namespace && v.Claim == claim && v.ID == handle && v.Node == nodeA {
			found++
		}
	}
	if found != 1 {
		h.Errorf("kubectl hostpath volumes has the claim %d times, want once: %+v", found, volumes)
	}
	var pools []struct {
		Node, Pool string
		SizeBytes  int64
	}
	h.plugin(&pools, "pools")
	nodes := map[string]bool{}
	for _, p := range pools {
		nodes[p.Node] = p.Pool != "" && p.SizeBytes > 0
	}
	if !nodes[nodeA] || !nodes[nodeB] {
		h.Errorf("kubectl hostpath pools has %+v, want pools of %s and %s", pools, nodeA, nodeB)
	}
	var findings []struct{ Check, Found, Problem string }
	h.plugin(&findings, "doctor")
	for _, f := range findings {
		// Other cases have nodes of their own.
		if (f.Check == "driver" || f.Check == "registration") && (strings.Contains(f.Problem, nodeA) || strings.Contains(f.Problem, nodeB)) {
			h.Errorf("kubectl hostpath doctor says of a cluster in order: %+v", f)
		}
	}
	if len(findings) < 8 {
		h.Errorf("kubectl hostpath doctor has made %d checks, want 8: %+v", len(findings), findings)
	}
	var report aReport
	h.plugin(&report, "inspect", nodeA)
	if report.Node != nodeA {
		h.Errorf("kubectl hostpath inspect %s has the report of %s", nodeA, report.Node)
	}
}

// plugin runs kubectl hostpath. Its exit status is 2 where other cases have something abnormal.
func (h *harness) plugin(into any, arguments ...string) {
	h.Helper()
	h.pluginWhile(into, func() {}, arguments...)
}

// pluginWhile is plugin that does something every few seconds until the plugin ends.
func (h *harness) pluginWhile(into any, meanwhile func(), arguments ...string) {
	h.Helper()
	command := exec.CommandContext(h.Context(), filepath.Join(c.Programs, "kubectl"), append(append([]string{"hostpath"}, arguments...), "--kubeconfig="+c.Kubeconfig, "-o", "json")...)
	command.Env = append(os.Environ(), "PATH="+c.Programs+":"+os.Getenv("PATH"))
	var out []byte
	ended := make(chan error, 1)
	go func() {
		var err error
		out, err = command.Output()
		ended <- err
	}()
	again := time.NewTicker(8 * time.Second)
	defer again.Stop()
	for {
		select {
		case <-again.C:
			meanwhile()
		case err := <-ended:
			var status *exec.ExitError
			if err != nil && (!errors.As(err, &status) || status.ExitCode() != 2) {
				h.Fatalf("kubectl hostpath %s: %v", strings.Join(arguments, " "), err)
			}
			if err := json.Unmarshal(out, into); err != nil {
				h.Fatalf("kubectl hostpath %s: %v in\n%s", strings.Join(arguments, " "), err, out)
			}
			return
		}
	}
}
