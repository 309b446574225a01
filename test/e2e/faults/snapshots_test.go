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
	{"snapshot", func(w *world) error { return w.snapshot(tried) }},
	{"snapshot again", func(w *world) error { return w.snapshot(kept) }},
	{"get snapshot", func(w *world) error {
		_, err := w.Controller().GetSnapshot(w.Context(), &csi.GetSnapshotRequest{SnapshotId: snapshotID(kept)})
		return err
	}},
	{"list snapshots", func(w *world) error { _, err := w.Snapshots(w.Context(), idle.ID); return err }},
	{"restore", func(w *world) error { _, err := w.Restore(w.Context(), late, snapshotID(kept)); return err }},
	{"clone", func(w *world) error { _, err := w.Clone(w.Context(), lateDisk, spare.ID); return err }},
	{"delete snapshot", func(w *world) error { return w.DeleteSnapshot(w.Context(), snapshotID(unwanted)) }},
}

func (w *world) snapshot(name string) error {
	_, err := w.Snapshot(w.Context(), name, idle.ID, "")
	return err
}

// What is copied during a fault is whole, or was not answered well. A snapshot from before is never lost.
func TestSnapshotsDuringFaults(t *testing.T) {
	driver := drivertest.Built(t)
	for name, fault := range map[string]struct {
		begin func(w *world) (end func())
		want  answers
	}{
		"full": {
			begin: func(w *world) func() { return w.fillUp(0) },
			want:  answers{"snapshot": codes.FailedPrecondition, "restore": codes.ResourceExhausted, "clone": codes.ResourceExhausted},
		},
		"read-only": {
			begin: func(w *world) func() {
				w.mount.remount(unix.MS_RDONLY)
				return func() { w.mount.remount(0) }
			},
			want: answers{
				"snapshot": codes.Unavailable, "restore": codes.ResourceExhausted, "clone": codes.ResourceExhausted, "delete snapshot": codes.Unavailable,
			},
		},
		"unmounted": {
			begin: func(w *world) func() {
				w.mount.unmount()
				return w.mount.mount
			},
			want: answers{
				"snapshot": codes.Unavailable, "snapshot again": codes.Unavailable, "get snapshot": codes.Unavailable,
				"restore": codes.ResourceExhausted, "clone": codes.ResourceExhausted, "delete snapshot": codes.Unavailable,
			},
		},
	} {
		for _, fs := range someFilesystems(1, 1) {
			t.Run(name+", "+fs.kind, func(t *testing.T) {
				w := newWorld(t, driver, newMount(t, fs))
				w.Must(w.unpublish(raw)) // the kernel lets no filesystem be read-only with a file open for writing
				w.Must(w.snapshot(kept))
				w.Must(w.snapshot(unwanted))
				end := fault.begin(w)
				for _, c := range copyCalls {
					w.wantAnswer(name, c, fault.want[c.name])
				}
				end()
				w.awaitServing(true)
				for _, c := range copyCalls {
					w.Eventually(c.name+" succeeds after the fault", func() bool { return c.make(w) == nil })
				}
				if got, err := os.ReadFile(filepath.Join(w.mount.at, late.ID, "file")); err != nil || string(got) != content {
					t.Errorf("what was restored has %q, %v", got, err)
				}
				for _, name := range []string{kept, tried} {
					w.Must(w.DeleteSnapshot(w.Context(), snapshotID(name)))
				}
				w.Must(w.Delete(w.Context(), late.ID))
				w.Must(w.Delete(w.Context(), lateDisk.ID))
				w.end()
			})
		}
	}
}

// clone makes another volume of one's content, and notes what the answer promises.
func (w *world) clone(of drivertest.Volume) error {
	v := of
	v.ID += "-clone"
	_, err := w.Clone(w.Context(), v, of.ID)
	if err == nil {
		w.acknowledged = append(w.acknowledged, drivertest.Kept{Volume: v})
	}
	return err
}
