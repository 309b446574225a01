package pool_test

import (
	"os"
	"strconv"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestStatusFilesystem(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.Tmpfs(t, 256*mib)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.start(local)
		h.create("pvc-1", 100*mib)
		must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-1", "data"), make([]byte, 10*mib), 0o644))
		h.later(time.Minute)
		status := h.Status()[0]
		if status.Space == nil || status.Space.SizeBytes != 256*mib || status.Space.FreeBytes > 246*mib || status.Space.Inodes == 0 {
			t.Fatalf("space %+v, want that of the tmpfs with 10 MiB in use", status.Space)
		}
		if got := h.capacity(); status.Available != got {
			t.Errorf("available are %d bytes, and the capacity is %d", status.Available, got)
		}
		if status.Counted.Used != volume.Unknown {
			t.Errorf("%d bytes in use, where they are not counted", status.Counted.Used)
		}
	})
}

func TestStatusOfSnapshots(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		source := id(t, "pvc-1")
		var promised int64
		for _, name := range []string{"daily", "weekly"} {
			id, err := volume.ParseSnapshot(name)
			must.Succeed(t, err)
			made, err := h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: id, Source: source})
			must.Succeed(t, err)
			promised += made.Promised
		}
		status := h.Status()[0]
		s := status.Snapshots
		if status.Volumes != 1 || s.Count != 2 || s.PointInTime != 2 || s.Lost != 0 || s.Promised != promised || promised == 0 {
			t.Errorf("%d volumes and the snapshots %+v, want one and two", status.Volumes, s)
		}
		var copies uint64
		for _, sum := range status.Copies.Done {
			copies += sum.Count
		}
		if copies != 2 || status.Copies.Running != 0 {
			t.Errorf("%d copies were made and %d go on, want 2 and none", copies, status.Copies.Running)
		}
		must.Succeed(t, os.Rename(h.Own("snapshots", "~daily"), h.Path("aside")))
		must.Succeed(t, os.WriteFile(h.Own("volumes", "~weekly.json"), []byte("{"), 0o600))
		h.later(2 * time.Minute)
		if s := h.Status()[0].Snapshots; s.Count != 2 || s.Lost != 2 {
			t.Errorf("the snapshots are %+v, want both lost", s)
		}
		for _, name := range []string{"daily", "weekly"} {
			id := must.Value(volume.ParseSnapshot(name))(t)
			must.Succeed(t, h.Snapshots().Delete(t.Context(), id))
		}
		h.later(2 * time.Minute)
		if s := h.Status()[0].Snapshots; s != (ledger.SnapshotSum{}) {
			t.Errorf("after they were deleted the snapshots are %+v", s)
		}
	})
}

func TestStatusOfUpstreamSnapshots(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		must.Succeed(t, os.MkdirAll(h.Path("away", "snapshot-1"), 0o755))
		h.start(`[{"name":"none","path":"a"},{"name":"inside","path":"b","snapshotPath":"b/csi/snapshots","snapshotProvider":"reflink"},` +
			`{"name":"outside","path":"c","snapshotPath":"away","snapshotProvider":"reflink"}]`)
		want := func(when string, want ...int) {
			t.Helper()
			h.later(2 * time.Minute)
			for i, status := range h.Status() {
				if status.Counted.Upstream != want[i] {
					t.Errorf("%s pool %s has %d snapshots of the upstream driver, want %d", when, status.Name, status.Counted.Upstream, want[i])
				}
			}
		}
		want("before there is one", volume.Unknown, 0, volume.Unknown)
		must.Succeed(t, os.MkdirAll(h.Path("b", "csi", "snapshots", "snapshot-2"), 0o755))
		want("with one", volume.Unknown, 1, volume.Unknown)
		must.Succeed(t, os.RemoveAll(h.Path("b", "csi")))
		must.Succeed(t, os.WriteFile(h.Path("b", "csi"), nil, 0o644))
		want("with a file in its way", volume.Unknown, volume.Unknown, volume.Unknown)
	})
}

func TestStatusOfMissingPool(t *testing.T) {
	onDisk(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		if status := h.Status()[0]; status.Space == nil || status.Available == 0 || !status.LastError.IsZero() {
			t.Errorf("status %+v, want numbers and no error", status)
		}
		must.Succeed(t, syscall.Unmount(h.Path("disk"), 0))
		h.later(10 * time.Second)
		status := h.Status()[0]
		if status.Space != nil || status.Available != 0 || status.Counted.Used != volume.Unknown || !status.LastError.Equal(time.Now()) {
			t.Errorf("status %+v, want no numbers and an error just now", status)
		}
		if diff := cmp.Diff(reasons(map[health.Reason]int{health.PoolMissing: 1}), status.Abnormal); diff != "" {
			t.Errorf("abnormal volumes (-want +got):\n%s", diff)
		}
		if status := h.Status()[1]; !status.LastError.IsZero() {
			t.Errorf("the other pool has an error at %v", status.LastError)
		}
	})
}

// reasons are all there are, with these numbers.
func reasons(numbers map[health.Reason]int) map[health.Reason]int {
	all := make(map[health.Reason]int)
	for _, reason := range health.Reasons() {
		all[reason] = numbers[reason]
	}
	return all
}

func TestStatusWithQuotas(t *testing.T) {
	withQuota(t, "", func(t *testing.T, h *harness) {
		h.create("pvc-1", 10*mib)
		h.create("pvc-2", 10*mib)
		must.Succeed(t, h.write("pvc-1", 4*mib))
		h.later(time.Minute)
		if used := h.Status()[0].Counted.Used; used < 4*mib || used > 5*mib {
			t.Errorf("%d bytes are in use, want about 4 MiB", used)
		}
	})
}

// wantTakable expects so many volumes that only the end of the disk stops, and about so many
// bytes that the others may still take.
func (h *harness) wantTakable(when string, unlimited int, untaken int64) {
	h.t.Helper()
	h.later(2 * time.Minute) // until what was made by hand is known, and checked
	status := h.Status()[0]
	if status.Counted.Unlimited != unlimited || status.Counted.Unused > untaken || status.Counted.Unused < untaken-mib/2 {
		h.t.Errorf("%s: %d volumes are without a limit and the others may take %d bytes, want %d and about %d", when, status.Counted.Unlimited, status.Counted.Unused, unlimited, untaken)
	}
}

func TestStatusUnlimitedAndUnused(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		f.off.Store(true)
		h.restart(local)
		h.wantTakable("without volumes", 0, 0)
		h.createBlock("disk-1", 4*mib)
		h.wantTakable("with a thick block volume", 0, 0)
		h.restart(thin)
		h.createBlock("disk-2", 4*mib)
		h.wantTakable("with a thin one", 0, 4*mib)
		must.Succeed(t, os.WriteFile(h.Path("pool", "disk-2", "disk.img"), make([]byte, 4*mib), 0o600))
		h.wantTakable("with a thin one that is full", 0, 0)
		h.create("pvc-1", 4*mib)
		must.Succeed(t, os.Mkdir(h.Path("pool", "by-hand"), 0o755))
		h.wantTakable("with directories", 2, 0)
		f.off.Store(false)
		h.later(10 * time.Second) // the next check
		h.create("pvc-2", 8*mib)
		must.Succeed(t, h.write("pvc-2", 2*mib))
		h.wantTakable("with quotas that were switched on later", 2, 6*mib)
		h.create("pvc-3", 8*mib)
		must.Succeed(t, h.Quota.Limit(h.open("pvc-3"), h.carried("pvc-3"), quota.Limit{}))
		h.wantTakable("with a limit that was removed, and set again", 2, 14*mib)
		must.Succeed(t, os.Rename(h.Path("pool", "pvc-3"), h.Path("aside")))
		h.wantTakable("with a volume that is lost", 2, 6*mib)
		f.uncounted.Store(uint32(h.carried("pvc-2")))
		h.wantTakable("with one that cannot be read", 3, 0)
		must.Succeed(t, os.Rename(h.Own(), h.Path("away")))
		h.later(time.Minute)
		if status := h.Status()[0]; status.Counted.Unlimited != volume.Unknown || status.Counted.Unused != volume.Unknown {
			t.Errorf("status %+v of a pool that is away", status)
		}
		must.Succeed(t, os.Rename(h.Path("away"), h.Own()))
	})
}

func TestStatusUnlimitedAndUnusedOfSharedPool(t *testing.T) {
	const shared = `[{"name":"local","path":"pool","shared":true}]`
	withFaults(t, shared, func(t *testing.T, h *harness, _ *faulty) {
		h.create("pvc-1", 8*mib)
		must.Succeed(t, h.write("pvc-1", 2*mib))
		h.wantTakable("with quotas", 0, 6*mib)
	})
}

func TestStatusTrash(t *testing.T) {
	testenv.NeedRoot(t)
	for _, counted := range []bool{true, false} {
		t.Run("counted "+strconv.FormatBool(counted), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, t.TempDir())
				if counted {
					h.Quota = &quotatest.Fake{As: quota.XFS}
				}
				h.start(local)
				if status := h.Status()[0]; status.Trash.Bytes != 0 || !status.Trash.Since.IsZero() {
					t.Errorf("status %+v, want no trash, and to know it", status)
				}
				h.create("pvc-1", 10*mib)
				h.create("pvc-2", 10*mib)
				if counted {
					must.Succeed(t, h.write("pvc-1", 4*mib))
				}
				must.Succeed(t, os.Mkdir(h.Path("pool", "pvc-1", "mounted"), 0o755))
				must.Succeed(t, syscall.Mount("tmpfs", h.Path("pool", "pvc-1", "mounted"), "tmpfs", 0, ""))
				h.delete("pvc-1")
				h.later(time.Second)
				h.delete("pvc-2") // is erased at once
				h.settled()
				status := h.Status()[0]
				if status.Trash.Pieces != 1 || status.Trash.Stuck != 1 || !status.Trash.Since.IsZero() {
					t.Errorf("status %+v, want one piece of trash, which is stuck", status)
				}
				if known := status.Trash.Bytes != volume.Unknown; known != counted || known && (status.Trash.Bytes < 4*mib || status.Trash.Bytes > 5*mib) {
					t.Errorf("the trash holds %d bytes, want 4 MiB where that is counted: %v", status.Trash.Bytes, counted)
				}
				if status.Erased.Volumes != 1 || status.Erased.Files == 0 || status.LastError.IsZero() {
					t.Errorf("status %+v, want one volume erased, and an error of the other", status)
				}

				// After a restart it is known for what it holds, and not for how long.
				h.later(time.Minute)
				h.restart(local)
				if status := h.Status()[0]; status.Trash.Pieces != 1 || (status.Trash.Bytes == volume.Unknown) == counted {
					t.Errorf("status %+v after a restart", status)
				}
				must.Succeed(t, syscall.Unmount(h.Own("trash", "node-1", names(t, h.Own("trash", "node-1"))[0], "mounted"), 0))
				h.later(time.Hour)
				if status := h.Status()[0]; status.Trash.Bytes != 0 || status.Trash.Stuck != 0 || !status.Trash.Since.IsZero() || status.Erased.Volumes != 1 {
					t.Errorf("status %+v after the trash was erased", status)
				}
			})
		})
	}
}

func TestStatusWithUncountableTrash(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		said := &diary{}
		h.log = funcr.New(said.write, funcr.Options{})
		h.restart(local)
		h.create("pvc-1", 10*mib)
		h.create("pvc-2", 10*mib)
		must.Succeed(t, h.write("pvc-1", 4*mib))
		must.Succeed(t, h.write("pvc-2", 4*mib))
		unread := h.carried("pvc-1")
		f.failBefore.Store(true) // so that neither can be erased
		h.delete("pvc-1")
		h.later(time.Minute)
		f.uncounted.Store(uint32(unread))
		h.delete("pvc-2")
		h.later(2 * time.Minute)
		reported := h.Status()[0].LastError
		h.later(30 * time.Minute)
		status := h.Status()[0]
		if status.Trash.Stuck != 2 || status.Trash.Bytes < 8*mib || status.Trash.Bytes > 9*mib {
			t.Errorf("status %+v, want two pieces of stuck trash of some 4 MiB each", status)
		}
		if n := said.count("Failed to count"); n != 1 || !status.LastError.Equal(reported) {
			t.Errorf("the log has %d times that trash could not be counted, the last error is from %v; want once, and none since %v", n, status.LastError, reported)
		}
		f.failBefore.Store(false)
		f.uncounted.Store(0)
		h.later(time.Hour)
		h.wantClean()
	})
}

func TestStatusOldestTrash(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		f.slowEnd.Store(true)
		h.create("pvc-1", mib)
		thrown := time.Now()
		h.delete("pvc-1")
		synctest.Wait() // until it is being erased
		if status := h.Status()[0]; status.Trash.Pieces != 1 || !status.Trash.Since.Equal(thrown) {
			t.Errorf("status %+v, want a piece of trash since %v", status, thrown)
		}
		h.later(time.Minute)
		if status := h.Status()[0]; status.Trash.Pieces != 0 || !status.Trash.Since.IsZero() {
			t.Errorf("status %+v, want no trash", status)
		}
	})
}

func TestSurveyFindsProblems(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		h.Quota = &quotatest.Fake{As: quota.XFS}
		h.each = true
		h.start(local)
		if status := h.Status()[0]; status.Abnormal == nil {
			t.Error("an empty pool was not surveyed at the start")
		}
		// More than are checked at once.
		for i := range 200 {
			h.create("pvc-"+strconv.Itoa(100+i), mib)
		}
		must.Succeed(t, h.write("pvc-100", mib))
		must.Succeed(t, h.write("pvc-101", mib/2))
		must.Succeed(t, os.Remove(h.Path("pool", "pvc-200")))
		must.Succeed(t, os.WriteFile(h.Own("volumes", "pvc-299.json"), []byte("{"), 0o600))
		h.later(time.Minute)
		want := reasons(map[health.Reason]int{health.NoSpace: 1, health.DirectoryMissing: 1, health.RecordUnreadable: 1})
		if diff := cmp.Diff(want, h.Status()[0].Abnormal); diff != "" {
			t.Errorf("abnormal volumes (-want +got):\n%s", diff)
		}
		seen := make(map[string]pool.Surveyed)
		for _, v := range h.Surveyed() {
			seen[v.ID.String()] = v
		}
		if len(seen) != 200 {
			t.Fatalf("%d volumes were surveyed, want 200", len(seen))
		}
		if v := seen["pvc-101"]; v.Pool.String() != "local" || v.Bytes != mib || v.Used < mib/2 || v.Used > mib || v.Inodes < 1 || v.Condition.Abnormal {
			t.Errorf("a volume that is in order was seen as %+v", v)
		}
		if v := seen["pvc-100"]; v.Condition.Reason != health.NoSpace {
			t.Errorf("a full volume was seen as %+v", v)
		}
		if v := seen["pvc-299"]; v.Used != volume.Unknown || v.Condition.Reason != health.RecordUnreadable {
			t.Errorf("a volume without a record was seen as %+v", v)
		}
		for _, v := range h.Surveyed() {
			defer must.Value(h.Lock(v.ID))(t)()
		}
		if got := h.Status()[0].Volumes; got != 200 || len(h.Surveyed()) != 200 {
			t.Errorf("while each volume has a call the status says %d volumes", got)
		}
	})
}

func TestSurveyMemory(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		h.later(time.Minute)
		if seen := h.Surveyed(); len(seen) > 0 {
			t.Errorf("%+v was kept", seen)
		}
	})
}

func TestSurveyPauseIsBounded(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		h.each = true
		h.restart(local)
		for i := range 16 { // as many as are checked at once
			h.create("pvc-"+strconv.Itoa(i), mib)
		}
		f.slow.Store(true)
		// A minute until the survey, a second for each volume, and the rest.
		h.later(100 * time.Second)
		f.slow.Store(false)
		if seen := h.Surveyed(); len(seen) != 16 {
			t.Errorf("%d volumes were surveyed, want 16", len(seen))
		}
	})
}

// An administrator can unmount a pool while its volumes are checked.
func TestPausedSurveyHasNothingOpen(t *testing.T) {
	onDisk(t, func(t *testing.T, h *harness) {
		for i := range 200 {
			h.create("pvc-"+strconv.Itoa(i), 4096)
		}
		h.later(time.Minute)
		must.Succeed(t, syscall.Unmount(h.Path("disk"), 0))
	})
}

func TestFilesystemErrorsAreReportedForAllVolumes(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", mib)
		if since := h.Status()[0].LastError; !since.IsZero() {
			t.Errorf("there was an error at %v", since)
		}
		h.Errors.Store(3)
		h.later(10 * time.Second) // the next check
		status := h.Status()[0]
		if status.Errors != 3 || status.Err != nil || !status.LastError.Equal(time.Now()) {
			t.Errorf("status %+v, want 3 errors just now, and that it serves", status)
		}
		if c := h.volume("pvc-1").Condition; c.Reason != health.FilesystemErrors {
			t.Errorf("condition %+v, want it to report the errors", c)
		}
		h.later(time.Minute)
		if diff := cmp.Diff(reasons(map[health.Reason]int{health.FilesystemErrors: 1}), h.Status()[0].Abnormal); diff != "" {
			t.Errorf("abnormal volumes (-want +got):\n%s", diff)
		}
		h.create("pvc-2", mib) // it is served all the same
		h.Errors.Store(0)
		h.later(10 * time.Second)
		if c := h.volume("pvc-1").Condition; c.Abnormal {
			t.Errorf("condition %+v after the count was reset", c)
		}
	})
}
