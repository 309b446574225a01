package blocks

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

const mib = 1 << 20

// A bench is a driver with one pool, and what of it a check has in use.
type bench struct {
	*drivertest.Driver
	mounted string // the pool's filesystem
	pool    string
	volumes []string
}

// newBench starts a driver on an empty pool.
func newBench(t *testing.T, driver string, fs filesystem, mounted, allocation string) *bench {
	t.Helper()
	pool, err := os.MkdirTemp(mounted, "pool-") //nolint:usetesting // t.TempDir is on another filesystem
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, os.RemoveAll(pool)) })
	return &bench{mounted: mounted, pool: pool, Driver: drivertest.Start(t, drivertest.Config{
		Binary: driver,
		Pools:  []drivertest.PoolConfig{{Name: "local", Path: pool, Enforcement: fs.enforcement, Allocation: allocation}},
	})}
}

// raw is what calls say of a volume.
func raw(name string, bytes int64) drivertest.Volume {
	return drivertest.Volume{ID: name, Pool: "local", Block: true, Bytes: bytes}
}

// create makes a volume, whose size is enforced whatever the pool is on.
func (b *bench) create(name string, bytes int64) {
	b.Helper()
	made, err := b.Create(b.Context(), raw(name, bytes))
	b.Must(err)
	v := made.GetVolume()
	if v.GetVolumeId() != name || v.GetCapacityBytes() != bytes || v.GetVolumeContext()["sizeEnforced"] != "true" {
		b.Errorf("the driver made %v, want %s with %d bytes, enforced", v, name, bytes)
	}
	b.volumes = append(b.volumes, name)
}

func (b *bench) delete(name string) error { return b.Delete(b.Context(), name) }

// publish publishes as kubelet does, and answers the path.
func (b *bench) publish(name, pod string) string {
	b.Helper()
	b.Must(b.tryPublish(name, pod))
	return b.Target(pod)
}

func (b *bench) tryPublish(name, pod string) error {
	return b.Publish(b.Context(), raw(name, 0), pod)
}

func (b *bench) tryPublishReadOnly(name, pod string) error {
	return b.PublishReadOnly(b.Context(), raw(name, 0), pod)
}

func (b *bench) unpublish(name, pod string) {
	b.Helper()
	b.Must(b.tryUnpublish(name, pod))
}

func (b *bench) tryUnpublish(name, pod string) error { return b.Unpublish(b.Context(), name, pod) }

func (b *bench) expand(name, pod string, bytes int64) error {
	grown, err := b.Expand(b.Context(), raw(name, bytes), pod)
	if err == nil && grown.GetCapacityBytes() != bytes {
		b.Errorf("the volume has %d bytes, want %d", grown.GetCapacityBytes(), bytes)
	}
	return err
}

// wantInOrder expects the driver to find nothing wrong with a published volume, and to
// report its size.
func (b *bench) wantInOrder(name, pod string, bytes int64) {
	b.Helper()
	got, err := b.Stats(b.Context(), name, pod)
	b.Must(err)
	usage := got.GetUsage()
	if oldcsi.Condition(got).GetAbnormal() || len(usage) != 1 || usage[0].GetTotal() != bytes || usage[0].GetUnit() != csi.VolumeUsage_BYTES {
		b.Errorf("stats of %s: %v, want %d bytes, in order", name, got, bytes)
	}
}

// wantDevices expects that many devices on files of the pool. What opens devices as
// they come and go may keep one for an instant.
func (b *bench) wantDevices(want int) (found []string) {
	b.Helper()
	b.Eventually(fmt.Sprintf("at most %d devices are on files of the pool", want), func() bool {
		var err error
		found, err = loopfs.Devices(b.pool)
		b.Must(err)
		return len(found) <= want
	})
	if len(found) != want {
		b.Errorf("the devices on files of the pool are %q, want %d", found, want)
	}
	return found
}

// removeAll deletes the volumes that were made and expects nothing to be left.
func (b *bench) removeAll() {
	b.Helper()
	for _, name := range b.volumes {
		b.Must(b.delete(name))
	}
	b.wantDevices(0)
	if mounts, err := mountns.Below(b.Targets); err != nil || len(mounts) > 0 {
		b.Errorf("still published: %q, %v", mounts, err)
	}
	b.AwaitNoTrash(b.pool)
	// The driver's own directory begins with a dot.
	if left, err := filepath.Glob(filepath.Join(b.pool, "[^.]*")); err != nil || len(left) > 0 {
		b.Errorf("left in the pool: %q, %v", left, err)
	}
}
