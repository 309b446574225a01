package devices_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

// awaitCleaned waits for the only volume to be cleaned. A wipefs that has outlived its agent keeps the device for a moment.
func awaitCleaned(w *devicestest.World) {
	w.Helper()
	for late := time.Now().Add(time.Minute); ; {
		r := w.Pass()
		if len(r.Cleaned) == 1 {
			return
		}
		if len(r.Problems) != 1 || r.Problems[0].Reason != devices.InUse || time.Now().After(late) {
			w.Fatalf("found %+v, want it cleaned", r)
		}
	}
}

// Killed before any system call by which it changes the disk or the record, its own or those of wipefs, an agent leaves a
// disk that the next one cleans.
func TestKilledAtAnyStepOfCleaning(t *testing.T) {
	// The program in the trap is this one, once it is no launcher any more.
	tr := trap.New(t, "/usr/bin/env")
	clean := func(t *testing.T, killAt int) (steps []trap.Step, killed bool) {
		t.Helper()
		w := devicestest.New(t)
		t.Cleanup(devices.UseSmallSteps())
		w.Config.Wipe = devices.WipeZero
		d := w.Disk("disk", 4*mib)
		devicestest.Run(t, "mkfs.ext4", "-q", "-F", d.Node)
		w.Disk("other", 4*mib).Untouched()
		records := t.TempDir()
		self, err := os.Executable()
		must.Succeed(t, err)
		cmd := exec.CommandContext(t.Context(), self, "--unset=TRAP_SOCKET", self)
		cmd.Env = append(os.Environ(), childVariable+"="+strings.Join([]string{d.Path, string(devices.WipeZero), records}, " "))
		cmd.Stdin = strings.NewReader(strings.Repeat("\n", 100))
		tr.Arm(killAt)
		output, err := cmd.CombinedOutput()
		steps, killed = tr.Disarm()
		if killed != (killAt > 0) {
			t.Fatalf("killed %t, %v: %s", killed, err, output)
		}
		w.Open(records)
		w.Restart()
		w.PVs = []devices.Volume{devicestest.Released(d.Volume("pv"))}
		awaitCleaned(w)
		d.WantNoSignature()
		d.WantZero(0, 4*mib)
		return steps, killed
	}
	steps, _ := clean(t, 0)
	t.Logf("steps: %q", steps)
	every := 1
	if testing.Short() {
		every = 13
	}
	for n := 1; n <= len(steps); n += every {
		t.Run(steps[n-1].Verb(), func(t *testing.T) { clean(t, n) })
	}
}
