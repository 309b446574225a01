package snapshots

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// Btrfs counts what a volume holds when it writes all that is still in memory, of others too. Pods with the volume come and go
// while a snapshot waits for that.
func TestPodsComeAndGoWhileSnapshotWaitsForDisk(t *testing.T) {
	testenv.NeedRoot(t)
	fs := slowDisk(t, "btrfs")
	must.Succeed(t, loopfs.SwitchQuotasOn(t.Context(), fs.At))
	h := newHarness(t, drivertest.Built(t), fs.At, "required")
	v := directory("pvc-1", size)
	h.MustCreate(v)
	h.Must(h.Publish(t.Context(), v, "first"))
	h.Must(os.WriteFile(filepath.Join(h.Target("first"), "file"), make([]byte, mib), 0o600))

	fs.Hang()
	defer fs.Heal() // before the driver ends
	h.Process.Hanging()
	made := make(chan error, 1)
	go func() { made <- must.Err(h.Snapshot(t.Context(), "s-1", v.ID, "")) }()
	h.Eventually("the driver waits for the disk", func() bool { return syncs(t, h.Process.Pid()) })
	h.Must(h.Publish(t.Context(), v, "second"))
	h.Must(h.Unpublish(t.Context(), v.ID, "first"))
	fs.Heal()
	h.Must(<-made)
	h.Must(h.Unpublish(t.Context(), v.ID, "second"))
	h.Must(h.DeleteSnapshot(t.Context(), "s-1@"+drivertest.NodeName))
	h.delete(v.ID)
}

// syncs reports whether a thread of a process is in syncfs(2).
func syncs(t *testing.T, pid int) bool {
	t.Helper()
	threads := must.Value(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid)))(t)
	for _, thread := range threads {
		call, err := os.ReadFile(thread)
		if err == nil && strings.HasPrefix(string(call), fmt.Sprint(unix.SYS_SYNCFS, " ")) {
			return true
		}
	}
	return false
}
