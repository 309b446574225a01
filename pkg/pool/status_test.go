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
		b := newBench(t, root)
		b.start(local)
		b.create("pvc-1", 100*mib)
		must.Succeed(t, os.WriteFile(b.Path("pool", "pvc-1", "data"), make([]byte, 10*mib), 0o644))
		b.later(time.Minute)
		status := b.Status()[0]
		if status.Space == nil || status.Space.SizeBytes != 256*mib || status.Space.FreeBytes > 246*mib || status.Space.Inodes == 0 {
			t.Fatalf("space %+v, want that of the tmpfs with 10 MiB in use", status.Space)
		}
		if got := b.capacity(); status.Available != got {
			t.Errorf("available are %d bytes, and the capacity is %d", status.Available, got)
		}
		if status.Counted.Used != volume.Unknown {
			t.Errorf("%d bytes in use, where they are not counted", status.Counted.Used)
		}
	})
}

func TestStatusOfSnapshots(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		source := id(t, "pvc-1")
		var promised int64
		for _, name := range []string{"daily", "weekly"} {
			id, err := volume.ParseSnapshot(name)
			must.Succeed(t, err)
			made, err := b.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: id, Source: source})
			must.Succeed(t, err)
			promised += made.Promised
		}
		status := b.Status()[0]
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
		must.Succeed(t, os.Rename(b.Own("snapshots", "~daily"), b.Path("aside")))
		must.Succeed(t, os.WriteFile(b.Own("volumes", "~weekly.json"), []byte("{"), 0o600))
		b.later(2 * time.Minute)
		if s := b.Status()[0].Snapshots; s.Count != 2 || s.Lost != 2 {
			t.Errorf("the snapshots are %+v, want both lost", s)
		}
		for _, name := range []string{"daily", "weekly"} {
			id, err := volume.ParseSnapshot(name)
			must.Succeed(t, err)
			must.Succeed(t, b.Snapshots().Delete(t.Context(), id))
		}
		b.later(2 * time.Minute)
		if s := b.Status()[0].Snapshots; s != (ledger.SnapshotSum{}) {
			t.Errorf("after they were deleted the snapshots are %+v", s)
		}
	})
}

func TestStatusOfUpstreamSnapshots(t *testing.T) {
	testenv.NeedRoot(t)
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		must.Succeed(t, os.MkdirAll(b.Path("away", "snapshot-1"), 0o755))
		b.start(`[{"name":"none","path":"a"},{"name":"inside","path":"b","snapshotPath":"b/csi/snapshots","snapshotProvider":"reflink"},` +
			`{"name":"outside","path":"c","snapshotPath":"away","snapshotProvider":"reflink"}]`)
		want := func(when string, want ...int) {
			t.Helper()
			b.later(2 * time.Minute)
			for i, status := range b.Status() {
				if status.Counted.Upstream != want[i] {
					t.Errorf("%s pool %s has %d snapshots of the upstream driver, want %d", when, status.Name, status.Counted.Upstream, want[i])
				}
			}
		}
		want("before there is one", volume.Unknown, 0, volume.Unknown)
		must.Succeed(t, os.MkdirAll(b.Path("b", "csi", "snapshots", "snapshot-2"), 0o755))
		want("with one", volume.Unknown, 1, volume.Unknown)
		must.Succeed(t, os.RemoveAll(b.Path("b", "csi")))
		must.Succeed(t, os.WriteFile(b.Path("b", "csi"), nil, 0o644))
		want("with a file in its way", volume.Unknown, volume.Unknown, volume.Unknown)
	})
}

func TestStatusOfMissingPool(t *testing.T) {
	onDisk(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		if status := b.Status()[0]; status.Space == nil || status.Available == 0 || !status.LastError.IsZero() {
			t.Errorf("status %+v, want numbers and no error", status)
		}
		must.Succeed(t, syscall.Unmount(b.Path("disk"), 0))
		b.later(10 * time.Second)
		status := b.Status()[0]
		if status.Space != nil || status.Available != 0 || status.Counted.Used != volume.Unknown || !status.LastError.Equal(time.Now()) {
			t.Errorf("status %+v, want no numbers and an error just now", status)
		}
		if diff := cmp.Diff(reasons(map[health.Reason]int{health.PoolMissing: 1}), status.Abnormal); diff != "" {
			t.Errorf("abnormal volumes (-want +got):\n%s", diff)
		}
		if status := b.Status()[1]; !status.LastError.IsZero() {
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
	withQuota(t, "", func(t *testing.T, b *bench) {
		b.create("pvc-1", 10*mib)
		b.create("pvc-2", 10*mib)
		must.Succeed(t, b.write("pvc-1", 4*mib))
		b.later(time.Minute)
		if used := b.Status()[0].Counted.Used; used < 4*mib || used > 5*mib {
			t.Errorf("%d bytes are in use, want about 4 MiB", used)
		}
	})
}

// wantTakable expects so many volumes that only the end of the disk stops, and about so many
// bytes that the others may still take.
func (b *bench) wantTakable(when string, unlimited int, untaken int64) {
	b.t.Helper()
	b.later(2 * time.Minute) // until what was made by hand is known, and checked
	status := b.Status()[0]
	if status.Counted.Unlimited != unlimited || status.Counted.Unused > untaken || status.Counted.Unused < untaken-mib/2 {
		b.t.Errorf("%s: %d volumes are without a limit and the others may take %d bytes, want %d and about %d", when, status.Counted.Unlimited, status.Counted.Unused, unlimited, untaken)
	}
}

func TestStatusUnlimitedAndUnused(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		f.off.Store(true)
		b.restart(local)
		b.wantTakable("without volumes", 0, 0)
		b.createBlock("disk-1", 4*mib)
		b.wantTakable("with a thick block volume", 0, 0)
		b.restart(thin)
		b.createBlock("disk-2", 4*mib)
		b.wantTakable("with a thin one", 0, 4*mib)
		must.Succeed(t, os.WriteFile(b.Path("pool", "disk-2", "disk.img"), make([]byte, 4*mib), 0o600))
		b.wantTakable("with a thin one that is full", 0, 0)
		b.create("pvc-1", 4*mib)
		must.Succeed(t, os.Mkdir(b.Path("pool", "by-hand"), 0o755))
		b.wantTakable("with directories", 2, 0)
		f.off.Store(false)
		b.later(10 * time.Second) // the next check
		b.create("pvc-2", 8*mib)
		must.Succeed(t, b.write("pvc-2", 2*mib))
		b.wantTakable("with quotas that were switched on later", 2, 6*mib)
		b.create("pvc-3", 8*mib)
		must.Succeed(t, b.Quota.Limit(b.open("pvc-3"), b.carried("pvc-3"), quota.Limit{}))
		b.wantTakable("with a limit that was removed, and set again", 2, 14*mib)
		must.Succeed(t, os.Rename(b.Path("pool", "pvc-3"), b.Path("aside")))
		b.wantTakable("with a volume that is lost", 2, 6*mib)
		f.uncounted.Store(uint32(b.carried("pvc-2")))
		b.wantTakable("with one that cannot be read", 3, 0)
		must.Succeed(t, os.Rename(b.Own(), b.Path("away")))
		b.later(time.Minute)
		if status := b.Status()[0]; status.Counted.Unlimited != volume.Unknown || status.Counted.Unused != volume.Unknown {
			t.Errorf("status %+v of a pool that is away", status)
		}
		must.Succeed(t, os.Rename(b.Path("away"), b.Own()))
	})
}

func TestStatusUnlimitedAndUnusedOfSharedPool(t *testing.T) {
	const shared = `[{"name":"local","path":"pool","shared":true}]`
	withFaults(t, shared, func(t *testing.T, b *bench, _ *faulty) {
		b.create("pvc-1", 8*mib)
		must.Succeed(t, b.write("pvc-1", 2*mib))
		b.wantTakable("with quotas", 0, 6*mib)
	})
}

func TestStatusTrash(t *testing.T) {
	testenv.NeedRoot(t)
	for _, counted := range []bool{true, false} {
		t.Run("counted "+strconv.FormatBool(counted), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, t.TempDir())
				if counted {
					b.Quota = &quotatest.Fake{As: quota.XFS}
				}
				b.start(local)
				if status := b.Status()[0]; status.Trash.Bytes != 0 || !status.Trash.Since.IsZero() {
					t.Errorf("status %+v, want no trash, and to know it", status)
				}
				b.create("pvc-1", 10*mib)
				b.create("pvc-2", 10*mib)
				if counted {
					must.Succeed(t, b.write("pvc-1", 4*mib))
				}
				must.Succeed(t, os.Mkdir(b.Path("pool", "pvc-1", "mounted"), 0o755))
				must.Succeed(t, syscall.Mount("tmpfs", b.Path("pool", "pvc-1", "mounted"), "tmpfs", 0, ""))
				b.delete("pvc-1")
				b.later(time.Second)
				b.delete("pvc-2") // is erased at once
				b.settled()
				status := b.Status()[0]
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
				b.later(time.Minute)
				b.restart(local)
				if status := b.Status()[0]; status.Trash.Pieces != 1 || (status.Trash.Bytes == volume.Unknown) == counted {
					t.Errorf("status %+v after a restart", status)
				}
				must.Succeed(t, syscall.Unmount(b.Own("trash", "node-1", names(t, b.Own("trash", "node-1"))[0], "mounted"), 0))
				b.later(time.Hour)
				if status := b.Status()[0]; status.Trash.Bytes != 0 || status.Trash.Stuck != 0 || !status.Trash.Since.IsZero() || status.Erased.Volumes != 1 {
					t.Errorf("status %+v after the trash was erased", status)
				}
			})
		})
	}
}

func TestStatusWithUncountableTrash(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		said := &diary{}
		b.log = funcr.New(said.write, funcr.Options{})
		b.restart(local)
		b.create("pvc-1", 10*mib)
		b.create("pvc-2", 10*mib)
		must.Succeed(t, b.write("pvc-1", 4*mib))
		must.Succeed(t, b.write("pvc-2", 4*mib))
		unread := b.carried("pvc-1")
		f.failBefore.Store(true) // so that neither can be erased
		b.delete("pvc-1")
		b.later(time.Minute)
		f.uncounted.Store(uint32(unread))
		b.delete("pvc-2")
		b.later(2 * time.Minute)
		reported := b.Status()[0].LastError
		b.later(30 * time.Minute)
		status := b.Status()[0]
		if status.Trash.Stuck != 2 || status.Trash.Bytes < 8*mib || status.Trash.Bytes > 9*mib {
			t.Errorf("status %+v, want two pieces of stuck trash of some 4 MiB each", status)
		}
		if n := said.count("Failed to count"); n != 1 || !status.LastError.Equal(reported) {
			t.Errorf("the log has %d times that trash could not be counted, the last error is from %v; want once, and none since %v", n, status.LastError, reported)
		}
		f.failBefore.Store(false)
		f.uncounted.Store(0)
		b.later(time.Hour)
		b.wantClean()
	})
}

func TestStatusOldestTrash(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		f.slowEnd.Store(true)
		b.create("pvc-1", mib)
		thrown := time.Now()
		b.delete("pvc-1")
		synctest.Wait() // until it is being erased
		if status := b.Status()[0]; status.Trash.Pieces != 1 || !status.Trash.Since.Equal(thrown) {
			t.Errorf("status %+v, want a piece of trash since %v", status, thrown)
		}
		b.later(time.Minute)
		if status := b.Status()[0]; status.Trash.Pieces != 0 || !status.Trash.Since.IsZero() {
			t.Errorf("status %+v, want no trash", status)
		}
	})
}

func TestSurveyFindsProblems(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		b.Quota = &quotatest.Fake{As: quota.XFS}
		b.each = true
		b.start(local)
		if status := b.Status()[0]; status.Abnormal == nil {
			t.Error("an empty pool was not surveyed at the start")
		}
		// More than are checked at once.
		for i := range 200 {
			b.create("pvc-"+strconv.Itoa(100+i), mib)
		}
		must.Succeed(t, b.write("pvc-100", mib))
		must.Succeed(t, b.write("pvc-101", mib/2))
		must.Succeed(t, os.Remove(b.Path("pool", "pvc-200")))
		must.Succeed(t, os.WriteFile(b.Own("volumes", "pvc-299.json"), []byte("{"), 0o600))
		b.later(time.Minute)
		want := reasons(map[health.Reason]int{health.NoSpace: 1, health.DirectoryMissing: 1, health.RecordUnreadable: 1})
		if diff := cmp.Diff(want, b.Status()[0].Abnormal); diff != "" {
			t.Errorf("abnormal volumes (-want +got):\n%s", diff)
		}
		seen := make(map[string]pool.Surveyed)
		for _, v := range b.Surveyed() {
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
		for _, v := range b.Surveyed() {
			defer must.Value(b.Lock(v.ID))(t)()
		}
		if got := b.Status()[0].Volumes; got != 200 || len(b.Surveyed()) != 200 {
			t.Errorf("while each volume has a call the status says %d volumes", got)
		}
	})
}

func TestSurveyMemory(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		b.later(time.Minute)
		if seen := b.Surveyed(); len(seen) > 0 {
			t.Errorf("%+v was kept", seen)
		}
	})
}

func TestSurveyPauseIsBounded(t *testing.T) {
	withFaults(t, local, func(t *testing.T, b *bench, f *faulty) {
		b.each = true
		b.restart(local)
		for i := range 16 { // as many as are checked at once
			b.create("pvc-"+strconv.Itoa(i), mib)
		}
		f.slow.Store(true)
		// A minute until the survey, a second for each volume, and the rest.
		b.later(100 * time.Second)
		f.slow.Store(false)
		if seen := b.Surveyed(); len(seen) != 16 {
			t.Errorf("%d volumes were surveyed, want 16", len(seen))
		}
	})
}

// An administrator can unmount a pool while its volumes are checked.
func TestPausedSurveyHasNothingOpen(t *testing.T) {
	onDisk(t, func(t *testing.T, b *bench) {
		for i := range 200 {
			b.create("pvc-"+strconv.Itoa(i), 4096)
		}
		b.later(time.Minute)
		must.Succeed(t, syscall.Unmount(b.Path("disk"), 0))
	})
}

func TestFilesystemErrorsAreReportedForAllVolumes(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", mib)
		if since := b.Status()[0].LastError; !since.IsZero() {
			t.Errorf("there was an error at %v", since)
		}
		b.Errors.Store(3)
		b.later(10 * time.Second) // the next check
		status := b.Status()[0]
		if status.Errors != 3 || status.Err != nil || !status.LastError.Equal(time.Now()) {
			t.Errorf("status %+v, want 3 errors just now, and that it serves", status)
		}
		if c := b.volume("pvc-1").Condition; c.Reason != health.FilesystemErrors {
			t.Errorf("condition %+v, want it to report the errors", c)
		}
		b.later(time.Minute)
		if diff := cmp.Diff(reasons(map[health.Reason]int{health.FilesystemErrors: 1}), b.Status()[0].Abnormal); diff != "" {
			t.Errorf("abnormal volumes (-want +got):\n%s", diff)
		}
		b.create("pvc-2", mib) // it is served all the same
		b.Errors.Store(0)
		b.later(10 * time.Second)
		if c := b.volume("pvc-1").Condition; c.Abnormal {
			t.Errorf("condition %+v after the count was reset", c)
		}
	})
}
