package pool_test

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Frozen pods are of use only where it is known that a store through a mapping shows once the page was written. Elsewhere a copy may lack
// what was stored before, and pass for one of that moment.
func TestFreezeNeedsFilesystemThatNotesStores(t *testing.T) {
	for name, c := range map[string]struct {
		mount func(t *testing.T) string
		want  error
	}{
		"ext4":      {func(t *testing.T) string { t.Helper(); return testenv.LoopFS(t, "ext4", 256*mib) }, nil},
		"overlayfs": {func(t *testing.T) string { t.Helper(); return testenv.Overlay(t, "ext4", 256*mib) }, volume.ErrPrecondition},
		"tmpfs":     {func(t *testing.T) string { t.Helper(); return testenv.Tmpfs(t, 256*mib) }, volume.ErrPrecondition},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, c.mount(t))
			h.begin("node-1", local)
			must.Succeed(t, h.Wait(t.Context()))
			h.create("pvc-1", mib)
			for n, way := range map[string]pool.CopyWay{"s-freeze": {WhenWritten: volume.Freeze}, "s-verify": {WhenWritten: volume.Verify}} {
				want := c.want
				if way.WhenWritten == volume.Verify {
					want = nil
				}
				_, err := h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, n), Source: id(t, "pvc-1"), Way: way})
				wantError(t, err, want)
			}
		})
	}
}
