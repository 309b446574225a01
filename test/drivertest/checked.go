package drivertest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// NewPool makes a directory for a pool on a filesystem, and removes it with all that is in it when the test ends.
func NewPool(t testing.TB, mounted string) string {
	t.Helper()
	pool, err := os.MkdirTemp(mounted, "pool-") //nolint:usetesting // t.TempDir is on another filesystem
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, os.RemoveAll(pool)) })
	return pool
}

// MustCreate makes a volume.
func (d *Driver) MustCreate(v Volume) {
	d.Helper()
	_, err := d.Create(d.Context(), v)
	d.Must(err)
}

// CreateEnforced makes a volume whose size the driver has to enforce.
func (d *Driver) CreateEnforced(v Volume) error {
	made, err := d.Create(d.Context(), v)
	if got := made.GetVolume(); err == nil && (got.GetVolumeId() != v.ID || got.GetCapacityBytes() != v.Bytes || got.GetVolumeContext()["sizeEnforced"] != "true") {
		return fmt.Errorf("the driver made %v, want %s with %d bytes, enforced", got, v.ID, v.Bytes)
	}
	return err
}

// MustPublish publishes as kubelet does, and answers the path.
func (d *Driver) MustPublish(v Volume, pod string) string {
	d.Helper()
	d.Must(d.Publish(d.Context(), v, pod))
	return d.Target(pod)
}

// MustUnpublish takes a volume from a pod.
func (d *Driver) MustUnpublish(id, pod string) {
	d.Helper()
	d.Must(d.Unpublish(d.Context(), id, pod))
}

// ExpandExactly lets a volume grow to the bytes that v says, and no others.
func (d *Driver) ExpandExactly(v Volume, pod string) error {
	grown, err := d.Expand(d.Context(), v, pod)
	if err == nil && grown.GetCapacityBytes() != v.Bytes {
		return fmt.Errorf("the volume has %d bytes, want %d", grown.GetCapacityBytes(), v.Bytes)
	}
	return err
}

// MustCapacity is what a pool can still promise.
func (d *Driver) MustCapacity(pool string) int64 {
	d.Helper()
	bytes, err := d.Capacity(d.Context(), pool)
	d.Must(err)
	return bytes
}

// MustMetrics are those of a driver with ServeMetrics, as they are scraped.
func (d *Driver) MustMetrics() string {
	d.Helper()
	scraped, err := d.Metrics(d.Context())
	d.Must(err)
	return scraped
}

// WantEmpty waits until what was removed from a pool is gone, and expects that nothing is left but the driver's own directory.
func (d *Driver) WantEmpty(pool string) {
	d.Helper()
	d.AwaitNoTrash(pool)
	if left, err := filepath.Glob(filepath.Join(pool, "[^.]*")); err != nil || len(left) > 0 {
		d.Errorf("left in the pool: %q, %v", left, err)
	}
}
