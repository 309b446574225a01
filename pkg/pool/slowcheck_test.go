package pool_test

import (
	"fmt"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A check that compares many limits takes longer than a driver may be silent, and calls are served meanwhile.
func TestSlowCheckDoesNotLosePool(t *testing.T) {
	withFaults(t, local, func(t *testing.T, one *harness, f *faulty) {
		for i := range 300 {
			one.create(fmt.Sprintf("pvc-%d", i), mib)
		}
		two := &harness{t: t, Node: one.Beside(), real: one.DetectQuota}
		two.startNode("node-1", local)
		f.off.Store(true)
		one.later(11 * time.Second)
		f.slow.Store(true)
		f.off.Store(false)
		for i := range 60 {
			two.later(5 * time.Second)
			two.wantServedBy("node-1")
			_, err := one.Create(t.Context(), pool.Request{ID: id(t, fmt.Sprintf("pvc-slow-%d", i)), Range: volume.Range{Required: mib}})
			must.Succeed(t, err)
		}
		f.slow.Store(false)
	})
}
