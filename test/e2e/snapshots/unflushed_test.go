package snapshots

import (
	"fmt"
	"os"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// What the users of a disk have written, and the node still has in memory, comes to its file while a snapshot is made: after it was found out how
// much the file keeps. On btrfs no write fails after that either.
func TestDiskWithUnflushedWritesIsSnapshotted(t *testing.T) {
	testenv.NeedRoot(t)
	h := newHarness(t, drivertest.Built(t), testenv.CountingBtrfs(t, 1<<30), "required")
	const bytes, part = 64 * mib, 128 << 10
	v := disk("pvc-disk", bytes)
	h.MustCreate(v)
	h.Must(h.Publish(h.Context(), v, "pod"))
	device, err := os.OpenFile(h.Target("pod"), os.O_WRONLY, 0)
	h.Must(err)
	made := 0
	for n := range int64(6) {
		for at := n * 4096; at < bytes; at += part { // all but the beginning of each part, so that btrfs keeps what it had of it
			_, err := device.WriteAt(pattern(int(part-n*4096), fmt.Sprint(n)), at)
			h.Must(err)
		}
		_, err := h.Snapshot(h.Context(), fmt.Sprint("snapshot-", n), v.ID, "")
		switch status.Code(err) {
		case codes.OK:
			made++
		case codes.FailedPrecondition: // the file keeps too much
		default:
			t.Error(err)
		}
	}
	if made < 3 || made == 6 {
		t.Errorf("%d of 6 snapshots were made", made)
	}
	if err := device.Sync(); err != nil {
		t.Errorf("what was written could not be kept: %v", err)
	}
	h.Must(device.Close())
	h.Must(h.Unpublish(h.Context(), v.ID, "pod"))
}
