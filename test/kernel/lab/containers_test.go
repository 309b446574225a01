package lab

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func needContainers(t *testing.T) {
	t.Helper()
	needGuest(t)
	if os.Getenv("HOSTPATH_KERNEL_CONTAINERS") == "" {
		t.Skip("the guest was started without --containers")
	}
}

func TestEachControllerHasGroups(t *testing.T) {
	needContainers(t)
	for _, controller := range []string{"blkio", "cpu", "cpuacct", "cpuset", "devices", "freezer", "memory", "pids"} {
		group := filepath.Join("/sys/fs/cgroup", controller, "lab")
		if err := os.Mkdir(group, 0o755); err != nil {
			t.Error(err)
			continue
		}
		// Only where a controller is mounted a group comes with files.
		if _, err := os.Stat(filepath.Join(group, "cgroup.procs")); err != nil {
			t.Error(err)
		}
		if err := os.Remove(group); err != nil {
			t.Error(err)
		}
	}
}

// What a container runtime does, in a mount namespace that was entered by its name.
func TestTheRootCanBeLeft(t *testing.T) {
	needContainers(t)
	const script = `mount --bind / "$0" && cd "$0" && pivot_root . mnt && test -e /mnt/init`
	dir := t.TempDir()
	output, err := exec.CommandContext(t.Context(), "nsenter", "--mount=/proc/1/ns/mnt", "--",
		"unshare", "--mount", "--propagation", "private", "sh", "-c", script, dir).CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, output)
	}
}

func TestABridgeHasPorts(t *testing.T) {
	needContainers(t)
	const script = `ip link add name bridge type bridge && ip link add name port type veth peer name other &&
		ip link set port master bridge && ip link set bridge up`
	output, err := exec.CommandContext(t.Context(), "unshare", "--net", "sh", "-c", script).CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, output)
	}
}
