package inspect

import (
	"path/filepath"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// A second driver on a pool that is not shared says who serves it, and takes over when that
// driver has ended, as in a rolling update or after a crash.
func TestSecondDriver(t *testing.T) {
	program := drivertest.Built(t)
	config := drivertest.Config{Binary: program, Pools: []drivertest.PoolConfig{{Name: "local", Path: filepath.Join(t.TempDir(), "pool")}}}
	one := drivertest.Start(t, config)
	const says = "another driver serves it, and it is not shared"
	two := drivertest.Launch(t, config)
	two.Eventually("the log says who serves the pool", func() bool { return strings.Contains(two.Process.Log(), says) })

	for name, end := range map[string]func() error{"stopped": one.Process.Stop, "killed": one.Process.Kill} {
		one.Must(end())
		two.AwaitServing()
		one.Must(one.Process.Restart(t.Context()))
		if _, err := one.Create(t.Context(), directory("pvc-3", mib)); err == nil {
			t.Errorf("%s: the driver that came back serves the pool beside the other", name)
		}
		two.Must(two.Process.Stop())
		one.AwaitServing()
		two.Must(two.Process.Restart(t.Context()))
	}
	two.Must(two.Process.Stop())
}
