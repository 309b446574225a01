package mounter

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// failing has a system call of the mounter fail, at the times that strace counts in a thread.
func failing(t *testing.T, call, err, when string) (setup string) {
	t.Helper()
	testenv.NeedPrograms(t, "strace")
	return fmt.Sprintf(`set -- strace -I 2 -f -qq -o /dev/null -e trace=%[1]s -e inject=%[1]s:error=%[2]s:when=%[3]s "$@"`, call, err, when)
}

// A filesystem that was made without quotas never gets them: a mistake that is corrected does not count.
func TestNothingIsFormattedForAMisspelledOption(t *testing.T) {
	for _, kind := range []string{"xfs", "ext4", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			h := newHost(t)
			d := newDisk(t, 310*mib)
			before := d.sum()
			status, said := h.try("mount", "--device", d.Path, "--fs-type", kind, "--mount-options", "noatme", "--patience", "0")
			if status != 1 || !contains(said, "mount options are refused") {
				t.Errorf("status %d, %s", status, said)
			}
			if d.sum() != before {
				t.Error("the device was written to")
			}
			p := h.start("", "mount", "--device", d.Path, "--fs-type", kind, "--mount-options", "noatime")
			p.says(keeping, 1)
			h.wantMounted(kind)
			p.stop(syscall.SIGTERM)
		})
	}
}

// What an ext4 has for quotas goes if the kernel does not take that, and never for another error of its first mount.
func TestErrorOfAMomentTakesNoFeatures(t *testing.T) {
	for _, err := range []string{"ENOMEM", "EIO", "EINTR"} {
		t.Run(err, func(t *testing.T) {
			h := newHost(t)
			d := newDisk(t, 310*mib)
			flags := []string{"mount", "--device", d.Path, "--fs-type", "ext4", "--patience", "0"}
			status, said := h.run(failing(t, "fsmount", err, "1+"), flags...)
			if features := tool(t, "dumpe2fs", "-h", d.Path); status != 1 || !contains(features, " project") || !contains(features, " quota") {
				t.Fatalf("status %d, %s; %s", status, features, said)
			}
			p := h.start("", flags...)
			if !p.saysOrEnds(keeping) {
				if !contains(p.output.String(), "tune2fs -O ^quota,^project "+d.Path) {
					t.Error("it does not say what to do")
				}
				tool(t, "tune2fs", "-O", "^quota,^project", d.Path)
				p = h.start("", flags...)
				p.says(keeping, 1)
			}
			h.wantMounted("ext4")
			p.stop(syscall.SIGTERM)
		})
	}
}

// A kernel that does not have quotas refuses them each time. All else has the mount fail, to be tried again: a remount would not switch them on.
func TestErrorOfAMomentLeavesNoQuotasOut(t *testing.T) {
	for _, err := range []string{"ENOMEM", "EIO", "EINTR", "EINVAL"} {
		t.Run(err, func(t *testing.T) {
			h := newHost(t)
			d := newDisk(t, 310*mib)
			tool(t, "mkfs.xfs", "-q", d.Path)
			trace := t.TempDir() + "/trace"
			// The third one makes the mount, after the source and prjquota.
			setup := strings.ReplaceAll(failing(t, "fsconfig", err, "3"), "/dev/null", trace)
			p := h.start(setup, "mount", "--device", d.Path)
			p.says(keeping, 1)
			h.wantMounted("xfs")
			limits := contains(tool(t, "findmnt", "--noheadings", "--output", "OPTIONS", h.Target), "prjquota")
			p.stop(syscall.SIGTERM)
			calls, readErr := os.ReadFile(trace)
			must.Succeed(t, readErr)
			if tried := strings.Count(string(calls), `"prjquota"`); !limits && tried < 2 {
				t.Errorf("it is mounted without quotas at once:\n%s", calls)
			}
		})
	}
}
