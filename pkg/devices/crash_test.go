package devices_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

// A trapped agent cleans the disk of a released volume, in a process of its own.
type trapped struct {
	*devicestest.Harness
	*trap.Trap
	disk    *devicestest.Disk
	records string
}

func newTrapped(h *devicestest.Harness, d *devicestest.Disk) trapped {
	h.Helper()
	records := h.TempDir()
	h.Open(records)
	// The program in the trap is this one, once it is no launcher any more.
	return trapped{h, trap.New(h.T, "/usr/bin/env"), d, records}
}

// clean runs the agent until it is killed, or has cleaned the disk.
func (tr trapped) clean() (output string, steps []trap.Step, killed bool) {
	tr.Helper()
	self, err := os.Executable()
	must.Succeed(tr, err)
	cmd := exec.CommandContext(tr.Context(), self, "--unset=TRAP_SOCKET", self)
	cmd.Env = append(os.Environ(), childVariable+"="+strings.Join([]string{tr.disk.Path, string(tr.Config.Wipe), tr.records}, " "))
	text, _ := cmd.CombinedOutput() // it never succeeds
	steps, killed = tr.Disarm()
	return string(text), steps, killed
}

// awaitCleaned waits for the only volume to be cleaned. A wipefs that has outlived its agent keeps the device for a moment.
func (tr trapped) awaitCleaned() {
	tr.Helper()
	for late := time.Now().Add(time.Minute); ; {
		r := tr.Pass()
		if len(r.Cleaned) == 1 {
			return
		}
		if len(r.Problems) != 1 || r.Problems[0].Reason != devices.InUse || time.Now().After(late) {
			tr.Fatalf("found %+v, want it cleaned", r)
		}
	}
}

// Killed before any system call by which it changes the disk or the record, its own or those of wipefs, an agent leaves a
// disk that the next one cleans, as a whole.
func TestKilledAtAnyStepOfCleaning(t *testing.T) {
	const bytes = 2 * mib
	h := devicestest.New(t)
	t.Cleanup(devices.UseSmallSteps())
	h.Config.Wipe = devices.WipeZero
	d := h.Disk("disk", bytes)
	devicestest.Run(t, "mkfs.ext4", "-q", "-F", d.Node)
	before, err := os.ReadFile(d.Node)
	must.Succeed(t, err)
	h.Disk("other", bytes).Untouched()
	tr := newTrapped(h, d)
	clean := func(killAt int) (steps []trap.Step) {
		t.Helper()
		d.Write(before)
		records, err := filepath.Glob(filepath.Join(tr.records, "*"))
		must.Succeed(t, err)
		for _, record := range records {
			must.Succeed(t, os.RemoveAll(record))
		}
		h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
		tr.Arm(killAt)
		output, steps, killed := tr.clean()
		if killed != (killAt > 0) {
			t.Fatalf("killed %t: %s", killed, output)
		}
		h.Restart()
		wiped := h.Wiped()
		tr.awaitCleaned()
		if wiped = h.Wiped() - wiped; wiped%bytes != 0 {
			t.Errorf("%d bytes were overwritten", wiped)
		}
		d.WantNoSignature()
		d.WantZero(0, bytes)
		return steps
	}
	steps := clean(0)
	t.Logf("steps: %q", steps)
	every := 1
	if testing.Short() {
		every = 5
	}
	for n := 1; n <= len(steps); n += every {
		t.Logf("killed before step %d, %s", n, steps[n-1])
		clean(n)
	}
}

// What the device erases securely may read as anything, and is overwritten after that. No disk that tests have knows
// BLKSECDISCARD: the kernel's answer is made up. That such a disk has nothing else to forget by is FUSE's own answer.
func TestSecureEraseIsFollowedByZeroes(t *testing.T) {
	h := devicestest.New(t)
	t.Cleanup(devices.UseSmallSteps())
	h.Config.Wipe = devices.WipeDiscard
	_, d := ill(h, "disk", 4*mib)
	d.Fill()
	h.PVs = []devices.Volume{h.Released(d.Volume("pv"))}
	const erase, zero = "ioctl 0x127d ", "ioctl 0x127f " // linux/fs.h
	tr := newTrapped(h, d)
	tr.ArmToFail(trap.Failure{Fails: func(_ int, s trap.Step) bool { return strings.HasPrefix(string(s), erase) }})
	output, steps, _ := tr.clean()
	var order []string
	for _, s := range steps {
		if verb := string(s)[:min(len(s), len(erase))]; verb == erase || verb == zero {
			order = append(order, verb)
		}
	}
	// At the head to see whether it can, and then each MiB.
	if want := slices.Repeat([]string{erase, zero}, 5); !slices.Equal(order, want) {
		t.Errorf("it was erased and overwritten by %q, want %q: %s", order, want, output)
	}
	tr.awaitCleaned()
	d.WantZero(0, 4*mib)
}
