package lab

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

func needContainers(t *testing.T) {
	t.Helper()
	needGuest(t)
	if os.Getenv("HOSTPATH_KERNEL_CONTAINERS") == "" {
		t.Skip("the guest was started without --containers")
	}
}

func TestControlGroups(t *testing.T) {
	needContainers(t)
	available, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	if err != nil {
		t.Fatal(err)
	}
	for _, controller := range []string{"cpu", "cpuset", "io", "memory", "pids"} {
		if !slices.Contains(strings.Fields(string(available)), controller) {
			t.Errorf("no controller %s among %s", controller, available)
		}
	}
}

// What a container runtime does, in a mount namespace that was entered by its name.
func TestPivotRoot(t *testing.T) {
	needContainers(t)
	const script = `mount --bind / "$0" && cd "$0" && pivot_root . mnt && test -e /mnt/init`
	dir := t.TempDir()
	output, err := exec.CommandContext(t.Context(), "nsenter", "--mount=/proc/1/ns/mnt", "--",
		"unshare", "--mount", "--propagation", "private", "sh", "-c", script, dir).CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, output)
	}
}

func TestBridgePorts(t *testing.T) {
	needContainers(t)
	const script = `ip link add name bridge type bridge && ip link add name port type veth peer name other &&
		ip link set port master bridge && ip link set bridge up`
	output, err := exec.CommandContext(t.Context(), "unshare", "--net", "sh", "-c", script).CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, output)
	}
}
