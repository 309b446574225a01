package mounter

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// rounds are the steps at which something is killed: all of them, or in the short form a few, the first ones mostly.
func rounds(yield func(int) bool) {
	for step := 1; yield(step); {
		if testing.Short() {
			step *= 4
		} else {
			step++
		}
	}
}

// Whatever mkfs has written when it is killed, and the mounter with it, the next mounter makes a filesystem of it, or says how to erase it: what has
// no name could be of another program.
func TestKilledWhileFormatting(t *testing.T) {
	testenv.NeedPrograms(t, "strace")
	for _, kind := range []string{"xfs", "ext4", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			for step := range rounds {
				if !killMkfs(t, kind, step) {
					t.Logf("mkfs.%s writes %d times at most", kind, step)
					return
				}
			}
		})
	}
}

// killMkfs reports whether mkfs wrote so often that it was killed.
func killMkfs(t *testing.T, kind string, step int) (killed bool) {
	t.Helper()
	h := newHost(t)
	d := newDisk(t, 310*mib)
	mkfs := tool(t, "sh", "-c", "command -v mkfs."+kind)
	script := fmt.Sprintf(`strace -I 2 -f -qq -o /dev/null -e inject=pwrite64,write:signal=KILL:when=%d %s "$@"
status=$?
[ $status -lt 128 ] || kill -9 $PPID
exit $status`, step, strings.TrimSpace(mkfs))
	flags := []string{"mount", "--device", d.Path, "--fs-type", kind}
	first := h.start(with(t, "mkfs."+kind, script), flags...)
	if first.saysOrEnds(keeping) {
		first.stop(syscall.SIGTERM)
		return false
	}
	h.wantUnmounted()
	second := h.start("", append(flags, "--patience", "0")...)
	if !second.saysOrEnds(keeping) {
		t.Logf("after write %d the device is to be erased", step)
		if !contains(second.output.String(), "blkdiscard") {
			t.Error("it does not say what to do")
		}
		must.Succeed(t, exec.Command("blkdiscard", "--zeroout", d.Path).Run())
		second = h.start("", flags...)
		second.says(keeping, 1)
	}
	h.wantMounted(kind)
	must.Succeed(t, os.WriteFile(filepath.Join(h.Target, "file"), nil, 0o600))
	second.stop(syscall.SIGTERM)
	h.wantNoNote()
	return true
}

// A device that mkfs was killed on, and that was used without a filesystem since, is not formatted: neither for the same pool nor after its clean-up.
func TestDataOfUnknownKindAfterKilledMkfs(t *testing.T) {
	for kind, at := range map[string]int64{"xfs": 0, "ext4": mib, "btrfs": mib} {
		t.Run(kind, func(t *testing.T) {
			h := newHost(t)
			d := newDisk(t, 310*mib)
			flags := []string{"mount", "--device", d.Path, "--fs-type", kind, "--patience", "0"}
			h.start(with(t, "mkfs."+kind, "kill -9 $PPID"), flags...).wait()
			d.write(at, "a database of its own")
			before := d.sum()
			if second := h.start("", flags...); second.saysOrEnds(keeping) {
				t.Error("it was formatted")
				second.stop(syscall.SIGTERM)
			}
			if d.sum() != before {
				t.Error("the device was written to")
			}
			if status, said := h.run("", "unmount", "--device", d.Path); status != 0 {
				t.Errorf("status %d, %s", status, said)
			}
			h.wantNoNote()
		})
	}
}

func (h *host) wantNoNote() {
	h.t.Helper()
	notes, err := filepath.Glob(filepath.Join(h.Path, ".pool-mounter.formatting*"))
	if err != nil || len(notes) != 0 {
		h.t.Errorf("left are %v, %v", notes, err)
	}
}

// steps are the system calls by which a mounter, or a program that it runs, changes anything or begins to.
var steps = []string{"mkdirat", "fchmod", "mknodat", "execve", "openat2", "renameat", "renameat2", "fsync", "unlinkat", "fsopen", "fsconfig", "fsmount", "open_tree", "mount_setattr", "move_mount"}

// Killed at any of its steps, a mounter leaves one mount or none, and the next one goes on from there.
func TestKilledAtAnyStep(t *testing.T) {
	testenv.NeedPrograms(t, "strace")
	for _, call := range steps {
		t.Run(call, func(t *testing.T) {
			for step := range rounds {
				if !killAt(t, call, step) {
					return
				}
			}
		})
	}
}

func killAt(t *testing.T, call string, step int) (killed bool) {
	t.Helper()
	h := newHost(t)
	d := newDisk(t, 310*mib)
	flags := []string{"mount", "--device", d.Path, "--patience", "0"}
	trace := fmt.Sprintf(`set -- strace -I 2 -f -qq -o /dev/null -e inject=%s:signal=KILL:when=%d "$@"`, call, step)
	first := h.start(trace, flags...)
	killed = !first.saysOrEnds(keeping)
	first.stop(syscall.SIGTERM)
	if found := len(h.mounts()); found > 1 {
		t.Fatalf("killed at %s %d it leaves %d mounts", call, step, found)
	}
	second := h.start("", flags...)
	second.says(keeping, 1)
	h.wantMounted("xfs")
	second.stop(syscall.SIGTERM)
	h.unmount()
	return killed
}
