package faults

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// One tenant has a volume, and a directory of it once more by subPath, which it moves so deep that the mount table has a line
// of more than 64 KiB. Another tenant, in another pool, must see nothing of that.
func TestLongLineOfMountTable(t *testing.T) {
	testenv.NeedRoot(t)
	d := drivertest.Start(t, drivertest.Config{
		Binary: drivertest.Built(t),
		Pools: []drivertest.PoolConfig{
			{Name: "local", Path: testenv.LoopFS(t, "ext4", 64<<20)},
			{Name: "other", Path: testenv.LoopFS(t, "ext4", 256<<20), RequireMount: true},
		},
		Flags: []string{"--metrics-address=127.0.0.1:0"},
	})
	ctx := t.Context()
	mine := drivertest.Volume{ID: "mine", Pool: "local", Bytes: 4 << 20}
	before := drivertest.Volume{ID: "before", Pool: "other", Bytes: 4 << 20}
	create := func(v drivertest.Volume) {
		t.Helper()
		_, err := d.Create(ctx, v)
		d.Must(err)
	}
	create(mine)
	create(before)
	d.Must(d.Publish(ctx, mine, "mine"))
	d.Must(d.Publish(ctx, before, "before"))

	// What kubelet does for subPath: a.
	a, sub := filepath.Join(d.Target("mine"), "a"), filepath.Join(d.Targets, "mine", "subpath")
	d.Must(os.Mkdir(a, 0o777))
	d.Must(os.Mkdir(sub, 0o750))
	d.Must(unix.Mount(a, sub, "", unix.MS_BIND, ""))
	t.Cleanup(func() { d.Must(unix.Unmount(sub, 0)) })
	testenv.Bury(t, a)

	others := func(when string) {
		t.Helper()
		for _, v := range []drivertest.Volume{
			{ID: "directory-" + when, Pool: "other", Bytes: 4 << 20},
			{ID: "disk-" + when, Pool: "other", Bytes: 4 << 20, Block: true},
		} {
			create(v)
			d.Must(d.Publish(ctx, v, v.ID))
			d.Must(d.Unpublish(ctx, v.ID, v.ID))
			d.Must(d.Delete(ctx, v.ID))
		}
	}
	others("now")
	d.Restart()
	d.AwaitServing()
	others("after-a-start")
	d.Must(d.Unpublish(ctx, "before", "before"))
	d.Must(d.Delete(ctx, "before"))

	d.Must(d.Unpublish(ctx, "mine", "mine"))
	d.WantCode("delete a volume of which a directory is mounted", d.Delete(ctx, "mine"), codes.FailedPrecondition)
}
