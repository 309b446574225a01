package blocks

import (
	"fmt"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

const mib = 1 << 20

// A harness is a driver with one pool, and what of it a check has in use.
type harness struct {
	*drivertest.Driver
	mounted string // the pool's filesystem
	pool    string
	volumes []string
}

// newHarness starts a driver on an empty pool.
func newHarness(t *testing.T, driver string, fs filesystem, mounted, allocation string) *harness {
	t.Helper()
	pool := drivertest.NewPool(t, mounted)
	return &harness{mounted: mounted, pool: pool, Driver: drivertest.Start(t, drivertest.Config{
		Binary: driver,
		Pools:  []drivertest.PoolConfig{{Name: "local", Path: pool, Enforcement: fs.enforcement, Allocation: allocation}},
	})}
}

// raw is what calls say of a volume.
func raw(name string, bytes int64) drivertest.Volume {
	return drivertest.Volume{ID: name, Pool: "local", Block: true, Bytes: bytes}
}

// create makes a volume, whose size is enforced whatever the pool is on.
func (h *harness) create(name string, bytes int64) {
	h.Helper()
	h.Must(h.CreateEnforced(raw(name, bytes)))
	h.volumes = append(h.volumes, name)
}

func (h *harness) delete(name string) error { return h.Delete(h.Context(), name) }

// publish publishes as kubelet does, and answers the path.
func (h *harness) publish(name, pod string) string { return h.MustPublish(raw(name, 0), pod) }

func (h *harness) tryPublish(name, pod string) error {
	return h.Publish(h.Context(), raw(name, 0), pod)
}

func (h *harness) tryPublishReadOnly(name, pod string) error {
	return h.PublishReadOnly(h.Context(), raw(name, 0), pod)
}

func (h *harness) tryUnpublish(name, pod string) error { return h.Unpublish(h.Context(), name, pod) }

func (h *harness) expand(name, pod string, bytes int64) error {
	return h.ExpandExactly(raw(name, bytes), pod)
}

// wantInOrder expects the driver to find nothing wrong with a published volume, and to
// report its size.
func (h *harness) wantInOrder(name, pod string, bytes int64) {
	h.Helper()
	got, err := h.Stats(h.Context(), name, pod)
	h.Must(err)
	usage := got.GetUsage()
	if oldcsi.Condition(got).GetAbnormal() || len(usage) != 1 || usage[0].GetTotal() != bytes || usage[0].GetUnit() != csi.VolumeUsage_BYTES {
		h.Errorf("stats of %s: %v, want %d bytes, in order", name, got, bytes)
	}
}

// wantDevices expects that many devices on files of the pool. What opens devices as
// they come and go may keep one for an instant.
func (h *harness) wantDevices(want int) (found []string) {
	h.Helper()
	h.Eventually(fmt.Sprintf("at most %d devices are on files of the pool", want), func() bool {
		var err error
		found, err = loopfs.Devices(h.pool)
		h.Must(err)
		return len(found) <= want
	})
	if len(found) != want {
		h.Errorf("the devices on files of the pool are %q, want %d", found, want)
	}
	return found
}

// removeAll deletes the volumes that were made and expects nothing to be left.
func (h *harness) removeAll() {
	h.Helper()
	for _, name := range h.volumes {
		h.Must(h.delete(name))
	}
	h.wantDevices(0)
	if mounts, err := mountns.Below(h.Targets); err != nil || len(mounts) > 0 {
		h.Errorf("still published: %q, %v", mounts, err)
	}
	h.WantEmpty(h.pool)
}
