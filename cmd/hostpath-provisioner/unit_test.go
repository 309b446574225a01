package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// unit is for hosts whose directory is labelled by hand.
const unit = "../../deploy/provisioner/host/hostpath-provisioner-selinux.service"

func TestUnit_systemdFindsNothingWrong(t *testing.T) {
	if testenv.Guest() {
		t.Skip("the guest has no systemd: make test has this")
	}
	testenv.NeedPrograms(t, "systemd-analyze")
	out, err := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--man=no", unit).CombinedOutput()
	if err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}

func TestUnit_labelsOnceAndBeforeKubelet(t *testing.T) {
	if testenv.Guest() {
		t.Skip("the guest has not the file: make test has this")
	}
	text, err := os.ReadFile(unit)
	must.Succeed(t, err)
	for _, line := range []string{"Before=kubelet.service", "Type=oneshot", "RemainAfterExit=yes", "RequiresMountsFor=/var/hpvolumes"} {
		if !slices.Contains(strings.Split(string(text), "\n"), line) {
			t.Errorf("%s is missing", line)
		}
	}
}

// Its commands leave the same label, however often they are run, and do not touch what is in the directory.
func TestUnitRunTwice_labelsOnlyTheDirectory(t *testing.T) {
	if testenv.Guest() {
		t.Skip("the guest has no mkdir: make test has this")
	}
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "chcon", "mkdir")
	text, err := os.ReadFile(unit)
	must.Succeed(t, err)
	// chcon changes a part of a label. Where no SELinux is, nothing has one.
	path := filepath.Join(testenv.LoopFS(t, "ext4", 64*mib), "pool")
	inside := filepath.Join(path, "pvc-1")
	must.Succeed(t, os.MkdirAll(inside, 0o777))
	const before = "system_u:object_r:var_t:s0"
	for _, labelled := range []string{path, inside} {
		must.Succeed(t, unix.Lsetxattr(labelled, "security.selinux", []byte(before), 0))
	}
	for range 2 {
		commands := 0
		for line := range strings.SplitSeq(string(text), "\n") {
			command, is := strings.CutPrefix(line, "ExecStart=")
			if !is {
				continue
			}
			commands++
			words := strings.Fields(strings.ReplaceAll(command, "/var/hpvolumes", path))
			if out, err := exec.CommandContext(t.Context(), words[0], words[1:]...).CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", line, err, out)
			}
		}
		if commands == 0 {
			t.Fatal("the unit does nothing")
		}
		for labelled, want := range map[string]string{path: "system_u:object_r:container_file_t:s0", inside: before} {
			label := make([]byte, 256)
			n, err := unix.Lgetxattr(labelled, "security.selinux", label)
			must.Succeed(t, err)
			if got := strings.TrimRight(string(label[:n]), "\x00"); got != want {
				t.Errorf("the label of %s is %s, want %s", labelled, got, want)
			}
		}
	}
}
