package blocks

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// The filesystem of a pool fails under pods. They can end, and their devices do not keep it in use, so that it can be repaired.
func TestDevicesOnFailedFilesystemEndWithTheirPods(t *testing.T) {
	driver := drivertest.Built(t)
	for name, again := range map[string]bool{"driver at work": false, "driver killed": true} {
		t.Run(name, func(t *testing.T) {
			pool := testenv.LoopFS(t, "xfs", poolBytes) // nothing can be removed from it afterwards
			h := &harness{pool: pool, Driver: drivertest.Start(t, drivertest.Config{Binary: driver, Pools: []drivertest.PoolConfig{{Name: "local", Path: pool}}})}
			h.create("disk", 4*mib)
			h.publish("disk", "pod")
			h.Must(h.tryPublishReadOnly("disk", "reader"))
			h.wantDevices(2)
			testenv.ShutDown(t, pool)
			if again { // its pool does not serve
				h.Must(h.Process.Kill())
				h.Must(h.Process.Restart(t.Context()))
			}
			h.Must(h.tryUnpublish("disk", "pod"))
			h.Must(h.tryUnpublish("disk", "reader"))
			h.wantDevices(0)
		})
	}
}
