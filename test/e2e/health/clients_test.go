package health_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// reported is what test/csi112 prints.
type reported struct {
	ControllerCapability, NodeCapability                 bool
	ListVolumes, ControllerGetVolume, NodeGetVolumeStats *oldcsi.VolumeCondition
}

// askOld asks as a client of CSI v1.12, by a program that has the types of that version.
func (d *driver) askOld(t *testing.T, program, id string) (got reported) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, d.Process.Endpoint(), id, d.Target(id))
	var problems strings.Builder
	cmd.Stderr = &problems
	printed, err := cmd.Output()
	if err != nil {
		t.Fatalf("ask as a client of v1.12: %v\n%s", err, problems.String())
	}
	must.Succeed(t, json.Unmarshal(printed, &got))
	return got
}

// health is what a client of v1.13 is told of a volume.
func (d *driver) health(t *testing.T, id string) string {
	t.Helper()
	got, err := d.Kubelet().NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id, VolumePublishPath: d.Target(id)})
	must.Succeed(t, err)
	var all []string
	for _, e := range got.GetVolumeHealth().GetHealthStatuses() {
		all = append(all, e.GetStatus().String()+" "+e.GetReason())
	}
	return strings.Join(all, ", ")
}

// Clients of CSI v1.12 are told of conditions as before, and those of v1.13 of the health, by one driver.
func TestClientsOfBothVersions(t *testing.T) {
	pool := filepath.Join(testenv.LoopFS(t, "ext4", 64*mib), "pool")
	d := start(t, drivertest.Built(t), pool)
	d.AwaitServing()
	program := filepath.Join(t.TempDir(), "csi112")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".")
	build.Dir = "../../csi112"
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the client of v1.12: %v\n%s", err, output)
	}
	for _, id := range []string{"good", "lost"} {
		d.create(t, id, mib)
		d.publish(t, id)
	}
	lost := filepath.Join(pool, "lost")
	must.Succeed(t, os.Rename(lost, filepath.Join(pool, ".aside")))
	t.Cleanup(func() { must.Succeed(t, os.Rename(filepath.Join(pool, ".aside"), lost)) })
	for _, id := range []string{"good", "lost"} {
		now := d.conditions(t, id)
		want := reported{true, true, now["ListVolumes"], now["ControllerGetVolume"], now["NodeGetVolumeStats"]}
		got := d.askOld(t, program, id)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("a client of v1.12 is told something else of %s than the bytes of the driver have (-driver +client):\n%s", id, diff)
		}
		if is, want := d.health(t, id), map[string]string{"lost": "DATA_LOSS DirectoryMissing"}[id]; is != want {
			t.Errorf("a client of v1.13 is told %q of %s, want %q", is, id, want)
		}
		if got.ListVolumes.GetAbnormal() != (id == "lost") || got.ListVolumes.GetMessage() == "" {
			t.Errorf("the condition of %s is %+v", id, got.ListVolumes)
		}
	}
}
