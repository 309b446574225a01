package faults

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// Snapshots of the volume idle.
const (
	kept     = "kept"     // from before the fault
	unwanted = "unwanted" // the same, to be deleted
	tried    = "tried"    // to be made
)

func snapshotID(name string) string { return name + "@" + drivertest.NodeName }

// copyCalls are those for snapshots, restores and clones, in an order in which each can succeed.
var copyCalls = []call{
	{"snapshot", func(h *harness) error { return h.snapshot(tried) }},
	{"snapshot again", func(h *harness) error { return h.snapshot(kept) }},
	{"get snapshot", func(h *harness) error {
		_, err := h.Controller().GetSnapshot(h.Context(), &csi.GetSnapshotRequest{SnapshotId: snapshotID(kept)})
		return err
	}},
	{"list snapshots", func(h *harness) error { _, err := h.Snapshots(h.Context(), idle.ID); return err }},
	{"restore", func(h *harness) error { _, err := h.Restore(h.Context(), late, snapshotID(kept)); return err }},
	{"clone", func(h *harness) error { _, err := h.Clone(h.Context(), lateDisk, spare.ID); return err }},
	{"delete snapshot", func(h *harness) error { return h.DeleteSnapshot(h.Context(), snapshotID(unwanted)) }},
}

func (h *harness) snapshot(name string) error {
	_, err := h.Snapshot(h.Context(), name, idle.ID, "")
	return err
}

// What is copied during a fault is whole, or was not answered well. A snapshot from before is never lost.
func TestSnapshotsDuringFaults(t *testing.T) {
	driver := drivertest.Built(t)
	for name, fault := range map[string]struct {
		begin func(w *harness) (end func())
		want  answers
	}{
		"full": {
			begin: func(h *harness) func() { return h.fillUp(0) },
			want:  answers{"snapshot": codes.FailedPrecondition, "restore": codes.ResourceExhausted, "clone": codes.ResourceExhausted},
		},
		"read-only": {
			begin: func(h *harness) func() {
				h.mount.remount(unix.MS_RDONLY)
				return func() { h.mount.remount(0) }
			},
			want: answers{
				"snapshot": codes.Unavailable, "restore": codes.ResourceExhausted, "clone": codes.ResourceExhausted, "delete snapshot": codes.Unavailable,
			},
		},
		"unmounted": {
			begin: func(h *harness) func() {
				h.mount.unmount()
				return h.mount.mount
			},
			want: answers{
				"snapshot": codes.Unavailable, "snapshot again": codes.Unavailable, "get snapshot": codes.Unavailable,
				"restore": codes.ResourceExhausted, "clone": codes.ResourceExhausted, "delete snapshot": codes.Unavailable,
			},
		},
	} {
		for _, fs := range someFilesystems(1, 1) {
			t.Run(name+", "+fs.kind, func(t *testing.T) {
				h := newHarness(t, driver, newMount(t, fs))
				h.Must(h.unpublish(raw)) // the kernel lets no filesystem be read-only with a file open for writing
				h.Must(h.snapshot(kept))
				h.Must(h.snapshot(unwanted))
				end := fault.begin(h)
				for _, c := range copyCalls {
					h.wantAnswer(name, c, fault.want[c.name])
				}
				end()
				h.awaitServing(true)
				for _, c := range copyCalls {
					h.Eventually(c.name+" succeeds after the fault", func() bool { return c.make(h) == nil })
				}
				if got, err := os.ReadFile(filepath.Join(h.mount.at, late.ID, "file")); err != nil || string(got) != content {
					t.Errorf("what was restored has %q, %v", got, err)
				}
				for _, name := range []string{kept, tried} {
					h.Must(h.DeleteSnapshot(h.Context(), snapshotID(name)))
				}
				h.Must(h.Delete(h.Context(), late.ID))
				h.Must(h.Delete(h.Context(), lateDisk.ID))
				h.end()
			})
		}
	}
}

// clone makes another volume of one's content, and notes what the answer promises.
func (h *harness) clone(of drivertest.Volume) error {
	v := of
	v.ID += "-clone"
	_, err := h.Clone(h.Context(), v, of.ID)
	if err == nil {
		h.acknowledged = append(h.acknowledged, drivertest.Kept{Volume: v})
	}
	return err
}
