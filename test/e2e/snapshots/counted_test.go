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
	fs := slowDisk(t, "btrfs", 512*mib)
	must.Succeed(t, loopfs.SwitchQuotasOn(t.Context(), fs.at))
	config := drivertest.PoolConfig{Name: "local", Path: fs.at, Enforcement: "required"}
	d := drivertest.Start(t, drivertest.Config{Binary: drivertest.Built(t), Pools: []drivertest.PoolConfig{config}})
	b := &harness{Driver: d, pool: &drivertest.Pool{Driver: d, PoolConfig: config}}
	v := directory("pvc-1", size)
	b.create(v)
	b.Must(b.Publish(t.Context(), v, "first"))
	b.Must(os.WriteFile(filepath.Join(b.Target("first"), "file"), make([]byte, mib), 0o600))

	fs.disk.Hang()
	defer fs.disk.Heal() // before the driver ends
	b.Process.Hanging()
	made := make(chan error, 1)
	go func() { made <- must.Err(b.Snapshot(t.Context(), "s-1", v.ID, "")) }()
	b.Eventually("the driver waits for the disk", func() bool { return syncs(t, b.Process.Pid()) })
	b.Must(b.Publish(t.Context(), v, "second"))
	b.Must(b.Unpublish(t.Context(), v.ID, "first"))
	fs.disk.Heal()
	b.Must(<-made)
	b.Must(b.Unpublish(t.Context(), v.ID, "second"))
	b.Must(b.DeleteSnapshot(t.Context(), "s-1@"+drivertest.NodeName))
	b.delete(v.ID)
}

// syncs reports whether a thread of a process is in syncfs(2).
func syncs(t *testing.T, pid int) bool {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid))
	must.Succeed(t, err)
	for _, thread := range threads {
		call, err := os.ReadFile(thread)
		if err == nil && strings.HasPrefix(string(call), fmt.Sprint(unix.SYS_SYNCFS, " ")) {
			return true
		}
	}
	return false
}
