package inspect

import (
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A second driver on a pool that is not shared says who serves it, and takes over when that
// driver has ended, as in a rolling update or after a crash.
func TestSecondDriver(t *testing.T) {
	testenv.NeedRoot(t)
	program, err := drivertest.Binary(t.Context(), t.TempDir())
	must.Succeed(t, err)
	one := &bench{program: program, pool: filepath.Join(t.TempDir(), "pool")}
	one.pools = []drivertest.PoolConfig{{Name: "local", Path: one.pool}}
	config := drivertest.Config{Binary: program, Pools: one.pools}
	one.Driver = drivertest.Start(t, config)
	one.create(directory("pvc-1", mib))
	one.Must(one.Publish(t.Context(), directory("pvc-1", mib), "pod"))

	const says = "another driver serves it, and it is not shared"
	two := drivertest.Launch(t, config)
	two.Eventually("the log says who serves the pool", func() bool { return strings.Contains(two.Process.Log(), says) })
	_, err = two.Create(t.Context(), directory("pvc-2", mib))
	two.WantCode("create", err, codes.ResourceExhausted)
	if p := one.report(2).Pools[0]; !p.Abnormal || !strings.Contains(p.Condition, "another waits") {
		t.Errorf("the pool is %+v, want that two drivers are configured with it", p)
	}

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
	one.Must(one.Unpublish(t.Context(), "pvc-1", "pod"))
	one.Must(one.Delete(t.Context(), "pvc-1"))
}
