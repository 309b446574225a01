package crash

import (
	"os"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

// TestUpstreamSnapshotCrashAtEveryStep kills the driver before each step by which it deletes a
// snapshot of the upstream driver. Afterwards the snapshot is whole, or is none any more, and
// the repeated call leaves nothing of it.
func TestUpstreamSnapshotCrashAtEveryStep(t *testing.T) {
	testenv.NeedRoot(t)
	driver := drivertest.Built(t)
	pool := filepath.Join(testenv.LoopFS(t, "ext4", 256*mib), "pool")
	path := filepath.Join(pool, "snapshots")
	tr := trap.New(t, driver)
	self, err := os.Executable() // which launches the driver
	must.Succeed(t, err)
	d := drivertest.Start(t, drivertest.Config{Binary: self, Pools: []drivertest.PoolConfig{{Name: "local", Path: pool, SnapshotPath: path}}})
	prepare := func() {
		for _, name := range []string{"snapshot-1/pvc-1", "snapshot-1/data/sub/deep"} {
			must.Succeed(t, os.MkdirAll(filepath.Join(path, name), 0o755))
		}
		for _, name := range []string{"disk.img", "sub/file", "sub/deep/file"} {
			must.Succeed(t, os.WriteFile(filepath.Join(path, "snapshot-1/data", name), []byte(content), 0o600))
		}
	}
	prepare()
	tr.Arm(0)
	must.Succeed(t, d.DeleteSnapshot(t.Context(), "snapshot-1"))
	learnt, _ := tr.Disarm()
	killed, kept := 0, 0
	for step := 1; step <= len(learnt); step++ {
		prepare()
		tr.Arm(step)
		err := d.DeleteSnapshot(t.Context(), "snapshot-1")
		if _, died := tr.Disarm(); !died {
			continue // the first time something else was at work, too
		}
		if killed++; err == nil {
			t.Errorf("step %d of %d: the call succeeded and had not ended", step, len(learnt))
		}
		must.Succeed(t, d.Process.Kill())
		must.Succeed(t, d.Process.Restart(t.Context()))
		d.AwaitServing()
		list, err := d.Snapshots(t.Context(), "")
		must.Succeed(t, err)
		if kept += len(list); len(list) > 0 {
			for _, name := range []string{"disk.img", "sub/file", "sub/deep/file"} {
				if data, err := os.ReadFile(filepath.Join(path, "snapshot-1/data", name)); err != nil || string(data) != content {
					t.Errorf("killed at step %d: a snapshot is listed whose %s has %q, %v", step, name, data, err)
				}
			}
		}
		must.Succeed(t, d.DeleteSnapshot(t.Context(), "snapshot-1"))
		if names, err := drivertest.Names(path); err != nil || len(names) > 0 {
			t.Errorf("killed at step %d, and deleted again: %q is left (%v)", step, names, err)
		}
	}
	if killed < 8 || kept == 0 || kept == killed {
		t.Errorf("it was killed %d times, and the snapshot was whole after %d of them", killed, kept)
	}
}
