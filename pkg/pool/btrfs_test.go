package pool_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func syncfs(t *testing.T, root string) {
	t.Helper()
	d := must.Value(dir.Open(root))(t)
	defer func() { must.Succeed(t, d.Close()) }()
	must.Succeed(t, unix.Syncfs(d.Fd()))
}

func writeSynced(t *testing.T, path string, bytes int) error {
	t.Helper()
	f := must.Value(os.Create(path))(t)
	defer func() { _ = f.Close() }()
	if _, err := f.Write(make([]byte, bytes)); err != nil {
		return err
	}
	return f.Sync()
}

// With simple quotas the pool does not serve if it requires enforcement. With ordinary ones, which the reason says how to get, its volumes
// have their limits again, also those that an earlier version had put into groups.
func TestSimpleQuotasEnforceNothing(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	const required = `[{"name":"local","path":"pool","enforcement":"required"}]`
	root := testenv.CountingBtrfs(t, 512*mib)
	withQuotas(t, root, required, func(t *testing.T, h *harness) {
		for _, name := range []string{"pvc-1", "pvc-full"} {
			h.create(name, 16*mib)
		}
		countSimply(t, root)
		for _, name := range []string{"pvc-1", "pvc-full"} {
			group(t, root, h.Path("pool", name))
		}
		h.restart(required)
		why := h.Status()[0].Err
		if why == nil || !strings.Contains(why.Error(), "btrfs has simple quotas, and only ordinary ones are supported: run btrfs quota disable") {
			t.Fatalf("enforcement is required, and the pool is served: %v", why)
		}
		h.restart(local)
		if h.Status()[0].Enforced {
			t.Error("sizes are enforced with simple quotas")
		}
		h.wantAbnormal("pvc-1", "limit")
		fillToLimit(t, h.Path("pool", "pvc-full"))
		h.delete("pvc-full")
		h.wantClean()

		_, commands, _ := strings.Cut(why.Error(), ": run ")
		command(t, "sh", "-c", commands)
		h.restart(required)
		h.create("pvc-2", 16*mib)
		for _, name := range []string{"pvc-1", "pvc-2"} {
			if c := h.volume(name).Condition; c.Abnormal {
				t.Errorf("%s is %+v", name, c)
			}
			must.ErrorIs(t, writeSynced(t, h.Path("pool", name, "data"), 32*mib), syscall.EDQUOT)
			h.delete(name)
		}
		h.wantClean()
	})
}

// countSimply switches from ordinary quotas to simple ones.
func countSimply(t *testing.T, root string) {
	t.Helper()
	if _, err := os.Stat("/sys/fs/btrfs/features/simple_quota"); err != nil {
		testenv.Missing(t, "simple quotas of btrfs, Linux 6.7 or newer")
	}
	switchQuotas(t, root, 2) // BTRFS_QUOTA_CTL_DISABLE
	switchQuotas(t, root, 4) // BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA
}

// group has a volume limited to 16 MiB as an earlier version did with simple quotas.
func group(t *testing.T, root, volume string) {
	t.Helper()
	command(t, "sh", "-ec", `id=$(btrfs inspect-internal rootid "$1") group=1/$((79508434583552 + id))
btrfs qgroup create $group "$0"
btrfs qgroup assign --no-rescan 0/$id $group "$0"
btrfs qgroup limit 16M $group "$0"`, root, volume)
}

// Quotas that were switched off and on again between two checks look as before, and have no limits.
func TestQuotasOffAndOnBetweenChecks(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 512*mib)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("pvc-1", 16*mib)
		h.later(time.Minute)
		switchQuotas(t, root, 2) // BTRFS_QUOTA_CTL_DISABLE
		switchQuotas(t, root, 1) // BTRFS_QUOTA_CTL_ENABLE
		h.wantAbnormal("pvc-1", "limit is missing")
		h.later(2 * time.Minute)
		if got := h.Status()[0].Restored; got == 0 {
			t.Error("no limit was set again")
		}
		if c := h.volume("pvc-1").Condition; c.Abnormal {
			t.Errorf("the volume is %+v", c)
		}
		if err := os.WriteFile(h.Path("pool", "pvc-1", "data"), make([]byte, 32*mib), 0o600); !errors.Is(err, syscall.EDQUOT) {
			t.Errorf("writing 32 MiB into 16: %v, want EDQUOT", err)
		}
		restored := h.Status()[0].Restored
		h.later(5 * time.Minute)
		if got := h.Status()[0].Restored; got != restored {
			t.Errorf("%d limits were set again, and then %d", restored, got)
		}
		h.delete("pvc-1")
		h.wantClean()
	})
}

// On btrfs an extent is there until all of it is overwritten, so that a block volume which has shared its
// blocks may take more than its promise. That is foreign use: the space of others is not sold for it.
func TestUseAbovePromiseIsForeign(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 1<<30)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		const used, empty = 192 * mib, 128 * mib
		h.createBlock("pvc-used", used)
		h.create("pvc-empty", empty)
		disk := h.Path("pool", "pvc-used", "disk.img")
		writeEvery(t, disk, used, 4096)
		_, err := h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s-1"), Source: id(t, "pvc-used")})
		must.Succeed(t, err)
		writeEvery(t, disk, used, 8192)
		must.Succeed(t, h.Snapshots().Delete(t.Context(), snapshotID(t, "s-1")))
		for range 10 {
			h.later(time.Minute)
			syncfs(t, root)
		}
		d, err := dir.Open(root)
		must.Succeed(t, err)
		defer func() { must.Succeed(t, d.Close()) }()
		space, err := dir.SpaceOf(d)
		must.Succeed(t, err)
		if got, most := h.capacity(), space.FreeBytes-empty; got > most {
			t.Errorf("%d MiB are free and %d of them promised, but the capacity is %d", space.FreeBytes/mib, empty/mib, got/mib)
		}
		for _, name := range []string{"pvc-used", "pvc-empty"} {
			h.delete(name)
		}
	})
}

// A pause holds up the second look for devices, which is that before a file is copied.
type pause struct {
	*looptest.Fake
	looks atomic.Int32
	until chan struct{}
}

func (p *pause) Attached(names ...string) ([]loop.Device, error) {
	if p.looks.Add(1) == 2 {
		<-p.until
	}
	return p.Fake.Attached(names...)
}

// A disk is not measured for a copy while another copy that was measured is still to be made: the blocks would be shared twice.
func TestDiskIsMeasuredForOneCopyAfterTheOther(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 512*mib)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.createBlock("pvc-1", 16*mib)
		must.Succeed(t, h.publishBlock("pvc-1", "pod"))
		p := &pause{Fake: h.Loops, until: make(chan struct{})}
		p.looks.Store(-1000) // not those of a start
		h.devices = p
		h.restart(local)
		p.looks.Store(0)
		made := make(chan error, 2)
		go func() { made <- h.snapshot("s-1", "pvc-1") }()
		synctest.Wait()
		go func() { made <- h.snapshot("s-2", "pvc-1") }()
		synctest.Wait()
		if n := len(made); n > 0 || p.looks.Load() != 3 {
			t.Errorf("%d snapshots were made, after %d looks for devices", n, p.looks.Load())
		}
		close(p.until)
		must.Succeed(t, <-made, <-made, h.unpublish("pvc-1", "pod"))
		h.delete("pvc-1")
	})
}

// A thin disk that was discarded in part, as earlier versions let it be, can be written in full: btrfs keeps the extents of which anything is
// left, and counts them.
func TestDiskThatWasDiscardedIsWritten(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 512*mib)
	withQuotas(t, root, `[{"name":"local","path":"pool","allocation":"thin"}]`, func(t *testing.T, h *harness) {
		const size = 64 * mib
		h.createBlock("pvc-1", size)
		disk := h.Path("pool", "pvc-1", "disk.img")
		writeBehind(t, disk, size, 0)
		f := must.Value(os.OpenFile(disk, os.O_WRONLY, 0))(t)
		for at := int64(0); at < size; at += mib {
			must.Succeed(t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at+4096, mib-4096))
		}
		must.Succeed(t, f.Sync(), f.Close())
		syncfs(t, root)
		writeBehind(t, disk, size, 0)
		h.delete("pvc-1")
	})
}

// What a disk keeps of a snapshot that was just erased, and nothing promises any more, is not sold before the next count finds it.
func TestWhatErasedSnapshotHasLeftIsNotSold(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 1<<30, "-m", "single")
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		const used, empty = 192 * mib, 256 * mib
		h.createBlock("pvc-used", used)
		h.create("pvc-empty", empty)
		disk := h.Path("pool", "pvc-used", "disk.img")
		writeBehind(t, disk, used, 0)
		must.Succeed(t, h.snapshot("s-1", "pvc-used"))
		syncfs(t, root)
		h.later(2 * time.Minute) // which counts
		writeBehind(t, disk, used, 4096)
		must.Succeed(t, h.Snapshots().Delete(t.Context(), snapshotID(t, "s-1")))
		h.wantClean()
		syncfs(t, root)
		before := h.capacity()
		h.later(2 * time.Minute)
		if counted := h.capacity(); before > counted+8*mib {
			t.Errorf("%d MiB were available before it was counted what the disk keeps, and then %d", before/mib, counted/mib)
		}
		h.delete("pvc-used")
		h.delete("pvc-empty")
	})
}

// Blocks that a pod has shared with another volume, as cp(1) does, stay when the first is erased. They are not sold before the next count
// finds them, also if the pod has removed its file before.
func TestWhatErasedVolumeHasLeftInAnotherIsNotSold(t *testing.T) {
	testenv.NeedRoot(t)
	for _, removed := range []bool{false, true} {
		t.Run(fmt.Sprintf("file removed %v", removed), func(t *testing.T) {
			root := testenv.CountingBtrfs(t, 1<<30, "-m", "single")
			withQuotas(t, root, local, func(t *testing.T, h *harness) {
				const used, empty = 192 * mib, 256 * mib
				h.create("pvc-old", used+16*mib)
				h.create("pvc-new", 16*mib)
				h.create("pvc-empty", empty)
				must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-old", "data"), make([]byte, used), 0o600))
				syncfs(t, root)
				h.later(2 * time.Minute) // which counts
				share(t, h.Path("pool", "pvc-old", "data"), h.Path("pool", "pvc-new", "data"))
				if removed {
					must.Succeed(t, os.Remove(h.Path("pool", "pvc-old", "data")))
				}
				h.delete("pvc-old")
				h.wantClean()
				syncfs(t, root)
				before := h.capacity()
				h.later(2 * time.Minute)
				if counted := h.capacity(); before > counted+8*mib {
					t.Errorf("%d MiB were available before it was counted what the other volume keeps, and then %d", before/mib, counted/mib)
				}
				h.delete("pvc-new")
				h.delete("pvc-empty")
			})
		})
	}
}

// What two volumes share that have snapshots counts for both of them. It hides nothing of what others hold.
func TestSharedByVolumesWithSnapshotsHidesNothing(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 512*mib, "-m", "single")
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		for _, name := range []string{"1", "2"} {
			h.create("pvc-"+name, 80*mib)
			must.Succeed(t, h.snapshot("s-"+name, "pvc-"+name))
		}
		must.Succeed(t, writeSynced(t, root+"/others", 80*mib), writeSynced(t, h.Path("pool", "pvc-1", "data"), 72*mib))
		h.wantNotHidden(root, func() { share(t, h.Path("pool", "pvc-1", "data"), h.Path("pool", "pvc-2", "data")) })
		h.delete("pvc-1")
		h.delete("pvc-2")
	})
}

// The same of what two subvolumes share with each other that are no volumes, and that nothing holds alone: those of others, and those that
// pods made.
func TestSharedByVolumesWithSnapshotsHidesNothingThatOthersShare(t *testing.T) {
	testenv.NeedRoot(t)
	for name, in := range map[string]string{"others": ".", "in a volume": "pool/pvc-3"} {
		t.Run(name, func(t *testing.T) {
			root := testenv.CountingBtrfs(t, 512*mib, "-m", "single")
			withQuotas(t, root, local, func(t *testing.T, h *harness) {
				for _, name := range []string{"1", "2"} {
					h.create("pvc-"+name, 80*mib)
					must.Succeed(t, h.snapshot("s-"+name, "pvc-"+name))
				}
				h.create("pvc-3", 16*mib)
				shared := root + "/" + in + "/shared"
				command(t, "btrfs", "subvolume", "create", shared)
				must.Succeed(t, writeSynced(t, shared+"/data", 80*mib), writeSynced(t, h.Path("pool", "pvc-1", "data"), 72*mib))
				command(t, "btrfs", "subvolume", "snapshot", shared, shared+"-2")
				h.wantNotHidden(root, func() { share(t, h.Path("pool", "pvc-1", "data"), h.Path("pool", "pvc-2", "data")) })
			})
		})
	}
}

// Nor what others hold in the trees, which a quota counts once and the disk has twice.
func TestSharedByVolumesWithSnapshotsHidesNoTreesOfOthers(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 1<<30, "-m", "dup")
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		for _, name := range []string{"1", "2"} {
			h.create("pvc-"+name, 100*mib)
			must.Succeed(t, h.snapshot("s-"+name, "pvc-"+name))
		}
		for n := range 4000 { // a leaf for each
			file := fmt.Sprintf("%s/%d", root, n)
			must.Succeed(t, os.WriteFile(file, nil, 0o600), unix.Setxattr(file, "user.leaf", make([]byte, 15000), 0))
		}
		must.Succeed(t, writeSynced(t, h.Path("pool", "pvc-1", "data"), 90*mib))
		h.wantNotHidden(root, func() { share(t, h.Path("pool", "pvc-1", "data"), h.Path("pool", "pvc-2", "data")) })
	})
}

// wantNotHidden expects the capacity not to grow by what users do in their volumes: it would hide what others hold.
func (h *harness) wantNotHidden(filesystem string, do func()) {
	h.t.Helper()
	counted := func() int64 {
		h.t.Helper()
		syncfs(h.t, filesystem)
		h.later(2 * time.Minute)
		return h.capacity()
	}
	before := counted()
	do()
	if after := counted(); after > before+8*mib {
		h.t.Errorf("the capacity has grown from %d to %d MiB", before/mib, after/mib)
	}
}

// share makes a file with the blocks of another.
func share(t *testing.T, from, to string) {
	t.Helper()
	source := must.Value(os.Open(from))(t)
	copied := must.Value(os.Create(to))(t)
	must.Succeed(t, unix.IoctlFileClone(int(copied.Fd()), int(source.Fd())), copied.Close(), source.Close())
}

// Each time that most of a disk is written after a snapshot, btrfs keeps the extents that were there before. There is no snapshot
// more, and no clone, before a write of the disk could fail.
func TestDiskIsWrittenAfterEachSnapshot(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 1<<30)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		const size = 64 * mib
		h.createBlock("pvc-1", size)
		disk := h.Path("pool", "pvc-1", "disk.img")
		refused := 0
		for n := range int64(6) {
			writeBehind(t, disk, size, n*4096)
			err := h.snapshot(fmt.Sprint("s-", n), "pvc-1")
			_, cloned := h.Create(t.Context(), pool.Request{
				ID: id(t, fmt.Sprint("pvc-clone-", n)), Mode: volume.ModeBlock, Source: &pool.Source{ID: id(t, "pvc-1")},
			})
			if err != nil {
				wantError(t, err, volume.ErrPrecondition)
				wantError(t, cloned, volume.ErrPrecondition)
				refused++
				continue
			}
			must.Succeed(t, cloned)
			h.delete(fmt.Sprint("pvc-clone-", n))
			last := snapshotID(t, fmt.Sprint("s-", n-1))
			if n > 0 {
				must.Succeed(t, h.Snapshots().Delete(t.Context(), last))
				h.later(time.Minute)
			}
		}
		if refused == 0 || refused == 6 {
			t.Errorf("%d of 6 snapshots were refused", refused)
		}
		// What was made can be written in full, too.
		_, err := h.Create(t.Context(), pool.Request{
			ID: id(t, "pvc-2"), Mode: volume.ModeBlock, Source: &pool.Source{ID: snapshotID(t, fmt.Sprint("s-", 5-refused))},
		})
		must.Succeed(t, err)
		for n := range int64(3) {
			writeBehind(t, h.Path("pool", "pvc-2", "disk.img"), size, (10+n)*4096)
		}
		h.delete("pvc-1")
		h.delete("pvc-2")
	})
}

// writeBehind writes each MiB of a file but for its beginning.
func writeBehind(t *testing.T, path string, bytes, skip int64) {
	t.Helper()
	f := must.Value(os.OpenFile(path, os.O_WRONLY, 0))(t)
	defer func() { must.Succeed(t, f.Close()) }()
	for at := skip; at < bytes; at += mib {
		must.Succeed(t, must.Err(f.WriteAt(make([]byte, mib-skip), at)))
	}
	must.Succeed(t, f.Sync())
}

// Of an extent of which the user has discarded nearly all, btrfs keeps all, also in a snapshot. The snapshot is promised that: what the
// volume then writes comes on top.
func TestSnapshotOfDiscardedDiskIsPromisedItsExtents(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 1<<30)
	withQuotas(t, root, `[{"name":"local","path":"pool","allocation":"thin"}]`, func(t *testing.T, h *harness) {
		const size, part = 128 * mib, 32 * mib
		h.createBlock("pvc-1", size)
		disk := h.Path("pool", "pvc-1", "disk.img")
		writeBehind(t, disk, size, 0)
		f, err := os.OpenFile(disk, os.O_WRONLY, 0)
		must.Succeed(t, err)
		for at := int64(0); at < size; at += part {
			must.Succeed(t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at+4096, part-4096))
		}
		must.Succeed(t, f.Sync(), f.Close(), h.snapshot("s-1", "pvc-1"))
		syncfs(t, root)
		before := freeBytes(t, root)
		writeBehind(t, disk, size, 0)
		syncfs(t, root)
		found, err := h.Snapshots().Find(t.Context(), snapshotID(t, "s-1"))
		must.Succeed(t, err)
		if held := before - freeBytes(t, root); found.Promised < held-mib {
			t.Errorf("the snapshot is promised %d bytes and keeps %d", found.Promised, held)
		}
		h.delete("pvc-1")
	})
}

func freeBytes(t *testing.T, path string) int64 {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	space, err := dir.SpaceOf(d)
	must.Succeed(t, err)
	return space.FreeBytes
}

// writeEvery writes a block of 4 KiB at each step of a file.
func writeEvery(t *testing.T, path string, bytes, step int64) {
	t.Helper()
	f := must.Value(os.OpenFile(path, os.O_WRONLY, 0))(t)
	block := make([]byte, 4096)
	for at := int64(0); at < bytes; at += step {
		block[0]++
		must.Succeed(t, must.Err(f.WriteAt(block, at)))
	}
	must.Succeed(t, f.Sync(), f.Close())
}

// wantHeldWithinPromises expects a snapshot to be promised what files of its volume have.
func (h *harness) wantHeldWithinPromises(name string) {
	h.t.Helper()
	found, err := h.Snapshots().Find(h.t.Context(), snapshotID(h.t, name))
	must.Succeed(h.t, err)
	d, err := dir.Open(h.Own("snapshots"))
	must.Succeed(h.t, err)
	defer func() { must.Succeed(h.t, d.Close()) }()
	occupied, err := dir.Occupied(d, "~"+name, func() error { return nil })
	must.Succeed(h.t, err)
	if found.Promised < occupied {
		h.t.Errorf("snapshot %s is promised %d bytes and holds %d", name, found.Promised, occupied)
	}
}

// Btrfs counts what was written when it commits, and a snapshot commits.
func TestSnapshotOfUnsyncedVolumeIsPromisedWhatItHolds(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	root := testenv.CountingBtrfs(t, 1<<30)
	withQuotas(t, root, `[{"name":"local","path":"pool","enforcement":"required"}]`, func(t *testing.T, h *harness) {
		h.create("pvc-1", 128*mib)
		must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-1", "data"), make([]byte, 64*mib), 0o600))
		made, err := h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s-1"), Source: id(t, "pvc-1")})
		must.Succeed(t, err)
		if made.Promised < 64*mib {
			t.Errorf("the snapshot is promised %d bytes, and holds %d", made.Promised, 64*mib)
		}
	})
}

// While btrfs counts all that is there anew, what a volume holds is not known: its snapshot would be promised next to nothing, and a clone of one
// with a subvolume, which its limit does not count, would hold more than its size.
func TestCopyWhileBtrfsCountsAnew(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	const extents = 40_000
	root := testenv.CountingBtrfs(t, 2<<30)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("pvc-1", 512*mib)
		data, err := os.Create(h.Path("pool", "pvc-1", "data"))
		must.Succeed(t, err)
		for n := range int64(extents) { // apart, so that there is much to count
			_, err := data.WriteAt(make([]byte, 4096), n*8192)
			must.Succeed(t, err)
		}
		must.Succeed(t, data.Close())
		h.create("pvc-2", 16*mib)
		command(t, "btrfs", "subvolume", "create", h.Path("pool", "pvc-2", "nested"))
		must.Succeed(t, writeSynced(t, h.Path("pool", "pvc-2", "nested", "data"), 64*mib))
		syncfs(t, root)
		counting := func() bool {
			out, err := exec.CommandContext(t.Context(), "btrfs", "quota", "rescan", "-s", root).CombinedOutput()
			must.Succeed(t, err)
			return strings.Contains(string(out), "rescan operation running")
		}
		for try := range 10 {
			must.Succeed(t, exec.CommandContext(t.Context(), "btrfs", "quota", "rescan", root).Run())
			made, err := h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, fmt.Sprint("s-", try)), Source: id(t, "pvc-1")})
			if err == nil && made.Promised < extents*4096 {
				t.Fatalf("the snapshot is promised %d bytes, and holds %d", made.Promised, extents*4096)
			}
			if err != nil {
				wantError(t, err, volume.ErrPrecondition)
			}
			if _, cloned := h.Create(t.Context(), pool.Request{ID: id(t, fmt.Sprint("clone-", try)), Range: volume.Range{Required: 16 * mib}, Source: &pool.Source{ID: id(t, "pvc-2")}}); cloned == nil {
				t.Fatal("a clone of 16 MiB was made that holds 64")
			}
			was := counting()
			must.Succeed(t, exec.CommandContext(t.Context(), "btrfs", "quota", "rescan", "-W", root).Run())
			h.later(time.Minute)
			if was && err != nil {
				_, err := h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, "s-later"), Source: id(t, "pvc-1")})
				must.Succeed(t, err)
				return
			}
		}
		t.Error("no snapshot was made while btrfs counted")
	})
}

// A snapshot of a subvolume has its limit. A volume that is to have none has none, also if it was made from one with a limit.
func TestCloneWithoutLimitOfVolumeWithOne(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 512*mib)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("pvc-1", 16*mib)
		h.restart(`[{"name":"local","path":"pool","enforcement":"none"}]`)
		_, err := h.Create(t.Context(), pool.Request{ID: id(t, "pvc-2"), Range: volume.Range{Required: 64 * mib}, Source: &pool.Source{ID: id(t, "pvc-1")}})
		must.Succeed(t, err, os.WriteFile(h.Path("pool", "pvc-2", "data"), make([]byte, 32*mib), 0o600))
	})
}

// What is in a subvolume in a volume does not count for that. A copy has it as its own, and is promised that.
func TestCopiesOfVolumeWithSubvolumesInside(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	root := testenv.CountingBtrfs(t, 1<<30)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("pvc-1", 64*mib)
		nested := h.Path("pool", "pvc-1", "nested")
		command(t, "btrfs", "subvolume", "create", nested)
		must.Succeed(t, os.WriteFile(nested+"/data", make([]byte, 32*mib), 0o600))
		snapshot := func(name string) error {
			return must.Err(h.Snapshots().Create(t.Context(), pool.SnapshotRequest{ID: snapshotID(t, name), Source: id(t, "pvc-1")}))
		}
		clone := func(name string, bytes int64) error {
			return must.Err(h.Create(t.Context(), pool.Request{ID: id(t, name), Range: volume.Range{Required: bytes}, Source: &pool.Source{ID: id(t, "pvc-1")}}))
		}
		must.Succeed(t, snapshot("s-1"))
		h.wantHeldWithinPromises("s-1")
		must.Succeed(t, os.WriteFile(nested+"/more", make([]byte, 64*mib), 0o600))
		wantError(t, snapshot("s-2"), volume.ErrPrecondition)
		wantError(t, clone("pvc-2", 64*mib), volume.ErrOutOfRange)
		must.Succeed(t, clone("pvc-3", 128*mib), os.WriteFile(h.Path("pool", "pvc-3", "data"), make([]byte, 16*mib), 0o600))
		h.settled()
	})
}

// On several disks trees are written to two of them, and take no more than all but the largest have. No more is promised: small files
// are in the trees, and the kernel makes the filesystem read-only when there is no room for these.
func TestPromisesFitIntoTreesOnUnequalDisks(t *testing.T) {
	testenv.NeedRoot(t)
	for _, disks := range [][]int64{{1536 * mib, 768 * mib}, {3072 * mib, 384 * mib}, {2048 * mib, 2048 * mib}} {
		root := testenv.BtrfsOfDisks(t, disks...)
		withQuotas(t, root, local, func(t *testing.T, h *harness) {
			most := min(disks[0], disks[1]) * 12 / 13
			got := h.capacity()
			if got > most || got < most/4 && disks[0] == disks[1] {
				t.Errorf("on disks of %d MiB %d can be promised, want no more than %d", disks, got/mib, most/mib)
			}
			if got > 0 {
				h.create("pvc-1", got)
				h.wantCapacity("local", 0, 2)
				h.delete("pvc-1")
			}
		})
	}
}

// switchQuotas switches the quotas of a btrfs, as btrfs-progs 6.7 and newer can.
func switchQuotas(t *testing.T, root string, command uint64) {
	t.Helper()
	d := must.Value(dir.Open(root))(t)
	defer func() { must.Succeed(t, d.Close()) }()
	args := [2]uint64{command}
	const quotaCtl = 3<<30 | 16<<16 | 0x94<<8 | 40 // BTRFS_IOC_QUOTA_CTL
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(d.Fd()), quotaCtl, uintptr(unsafe.Pointer(&args))); errno != 0 {
		t.Fatal(errno)
	}
}

// Data that was removed leaves its chunks behind, which are in no tree's reach. Where the trees are full then, nothing can be renamed any more,
// also not a volume into the trash. It is deleted all the same, and then it helps to balance the data, as docs/capacity.md says.
func TestDeleteWhereTreesAreFull(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 256*mib, "-m", "single")
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("other", 8*mib)
		h.create("empty", 8*mib)
		must.Succeed(t, os.WriteFile(h.Path("pool", "other", "data"), make([]byte, 4*mib), 0o600))
		h.create("full", h.capacity())
		fillTrees(t, root, h.Path("pool", "full"))
		for _, name := range []string{"empty", "full"} {
			h.delete(name)
			if _, err := os.Stat(h.Path("pool", name)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s is there after it was deleted: %v", name, err)
			}
		}
		h.settled()
		if _, err := h.Volume(t.Context(), id(t, "empty")); !errors.Is(err, volume.ErrNotFound) {
			t.Errorf("the deleted volume is %v", err)
		}
		for _, args := range [][]string{{"filesystem", "sync"}, {"subvolume", "sync"}, {"balance", "start", "-dusage=50"}} {
			if out, err := exec.Command("btrfs", append(args, root)...).CombinedOutput(); err != nil {
				t.Errorf("%v: %v: %s", args, err, out)
			}
		}
		must.Succeed(t, os.WriteFile(h.Path("pool", "other", "file"), []byte("x"), 0o600))
		h.later(2 * time.Minute)
		h.create("new", 8*mib)
	})
}

// A pod that makes subvolumes in its volume, one in the other, does not keep it from being deleted where the trees are full, nor do limits
// that it gives them.
func TestDeleteOfNestedWhereTreesAreFull(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 256*mib, "-m", "single")
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("other", 8*mib)
		h.create("full", h.capacity())
		for _, path := range []string{"other/nested", "other/nested/below", "other/nested/below/more", "other/nested/next", "full/nested"} {
			command(t, "btrfs", "subvolume", "create", h.Path("pool", path))
			must.Succeed(t, os.WriteFile(h.Path("pool", path, "file"), []byte("x"), 0o600))
		}
		makeSubvolume(t, h.Path("pool", "full"), "limited", "", mib)
		makeSubvolume(t, h.Path("pool", "full", "limited"), "below", "", mib)
		fillToLimit(t, h.Path("pool", "full", "limited"))
		command(t, "btrfs", "property", "set", h.Path("pool", "other/nested/next"), "ro", "true")
		fillTrees(t, root, h.Path("pool", "full"))
		h.delete("other")
		h.delete("full")
		h.settled()
		h.wantClean()
	})
}

// A reference of a move that a crash has ended is removed at the start with its record and its promise, also where the trees are full.
func TestReferenceIsRemovedWhereTreesAreFull(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 256*mib, "-m", "single")
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("pvc-1", 16*mib)
		must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-1", "data"), make([]byte, 4*mib), 0o600))
		must.Succeed(t, h.Moves().Reference(t.Context(), moveNamed(t, "pvc-1", "move-1"), "a", ""))
		h.later(2 * time.Minute)
		h.create("full", h.capacity())
		fillTrees(t, root, h.Path("pool", "full"))
		h.restart(local)
		h.delete("full")
		h.settled()
		h.restart(local)
		if s := h.Status()[0]; s.Promised != 16*mib || s.Snapshots.Count > 0 {
			t.Errorf("%d MiB are promised, and there are %+v", s.Promised/mib, s.Snapshots)
		}
	})
}

// fillTrees takes the disk for data in a volume, removes nearly all of that, and takes what is left for the trees.
func fillTrees(t *testing.T, root, volume string) {
	t.Helper()
	data := 0
	for errs := 0; errs < 2; data++ {
		f := must.Value(os.Create(fmt.Sprintf("%s/data-%d", volume, data)))(t)
		if unix.Fallocate(int(f.Fd()), 0, 0, mib) != nil {
			errs++
			syncfs(t, root)
		}
		must.Succeed(t, f.Close())
	}
	for i := range data {
		if i%24 != 0 {
			must.Succeed(t, os.Remove(fmt.Sprintf("%s/data-%d", volume, i)))
		}
	}
	syncfs(t, root)
	for n, errs := 0, 0; errs < 3; n++ { // a leaf for each
		file := fmt.Sprintf("%s/%d", volume, n)
		err := os.WriteFile(file, nil, 0o600)
		if err == nil {
			err = unix.Setxattr(file, "user.leaf", make([]byte, 15000), 0)
		}
		if err != nil {
			must.ErrorIs(t, err, syscall.ENOSPC)
			errs++
			syncfs(t, root)
		}
	}
}

// A volume whose directory came from a backup is limited once it was copied as the documentation says.
func TestVolumeFromBackupIsCounted(t *testing.T) {
	testenv.NeedRoot(t)
	_, section, _ := strings.Cut(string(must.Value(os.ReadFile("../../docs/layout.md"))(t)), "### A volume from a backup\n")
	section, _, _ = strings.Cut(section, "\n### ")
	root := testenv.CountingBtrfs(t, 512*mib)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("pvc-1", 16*mib)
		shell := func(command string) {
			t.Helper()
			command = strings.NewReplacer("<pool>", h.Path("pool"), "<volume id>", "pvc-1").Replace(command)
			if out, err := exec.Command("sh", "-ec", command).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s", command, err, out)
			}
		}
		shell("btrfs subvolume delete <pool>/<volume id> && mkdir -m 777 <pool>/<volume id>")
		must.Succeed(t, os.WriteFile(h.Path("pool", "pvc-1", "data"), make([]byte, 12*mib), 0o600))
		for line := range strings.Lines(section) {
			if command, is := strings.CutPrefix(line, "    "); is {
				shell(command)
			}
		}
		shell("rm -r <pool>/.old")
		h.restart(local)
		syncfs(t, root)
		f := must.Value(os.Create(h.Path("pool", "pvc-1", "more")))(t)
		_, err := f.Write(make([]byte, 8*mib))
		must.ErrorIs(t, errors.Join(err, f.Sync(), f.Close()), syscall.EDQUOT)
	})
}

// While quotas are inconsistent the pool is served without, and the kernel goes on limiting. A copy has the limit of no other.
func TestCopyWhileQuotasAreInconsistentHasNoLimit(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 512*mib)
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("pvc-1", 16*mib)
		must.Succeed(t, writeSynced(t, h.Path("pool", "pvc-1", "data"), 8*mib), h.snapshot("s-1", "pvc-1"))
		loseCount(t, root)
		h.restart(local)
		for name, of := range map[string]volume.ID{"clone": id(t, "pvc-1"), "restore": snapshotID(t, "s-1")} {
			must.Succeed(t, must.Err(h.Create(t.Context(), pool.Request{ID: id(t, name), Range: volume.Range{Required: 64 * mib}, Source: &pool.Source{ID: of}})))
			must.Succeed(t, writeSynced(t, h.Path("pool", name, "more"), 32*mib))
		}
	})
}

// Where the driver takes quotas for none, a source has no limit that the kernel keeps: what its copies hold of it would be charged to that, and
// writes within its size would fail.
func TestSourceIsWrittenAfterSnapshotsWhereQuotasCountAsNone(t *testing.T) {
	testenv.NeedRoot(t)
	for name, lose := range map[string]func(t *testing.T, h *harness, root string){
		"simple": func(t *testing.T, h *harness, root string) {
			countSimply(t, root)
			group(t, root, h.Path("pool", "pvc-1"))
			group(t, root, h.Path("pool", "pvc-disk"))
		},
		"inconsistent": func(t *testing.T, _ *harness, root string) { loseCount(t, root) },
	} {
		t.Run(name, func(t *testing.T) {
			root := testenv.CountingBtrfs(t, 512*mib)
			withQuotas(t, root, local, func(t *testing.T, h *harness) {
				h.create("pvc-1", 16*mib)
				h.createBlock("pvc-disk", 8*mib)
				lose(t, h, root)
				h.restart(local)
				data, disk := h.Path("pool", "pvc-1", "data"), h.Path("pool", "pvc-disk", "disk.img")
				for n := range 4 {
					must.Succeed(t, writeSynced(t, data, 10*mib))
					writeEvery(t, disk, 8*mib, 4096)
					must.Succeed(t, h.snapshot(fmt.Sprint("s-", n), "pvc-1"), h.snapshot(fmt.Sprint("disk-", n), "pvc-disk"))
					must.Succeed(t, os.Remove(data))
					syncfs(t, root)
				}
				if name == "inconsistent" {
					command(t, "btrfs", "quota", "rescan", "-w", root)
					h.later(2 * time.Minute)
					must.ErrorIs(t, writeSynced(t, data, 32*mib), syscall.EDQUOT) // it has its limit again
				}
			})
		})
	}
}

// What the trees need is measured while the driver runs, also beside a volume without a limit, with which it is not counted what others
// hold: after quotas were switched on, and after the trees were converted.
func TestTreesAreMeasuredWhileDriverRuns(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	root := testenv.MadeFS(t, "btrfs", 1<<30, "-m", "dup")
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("old", 8*mib)
		for _, c := range []struct{ what, command string }{
			{"quotas were switched on", `btrfs quota enable "$0"; btrfs quota rescan -w "$0"`},
			{"the trees became single", `btrfs balance start -f -mconvert=single "$0"`},
			{"the trees became duplicated", `btrfs balance start -f -mconvert=dup "$0"`},
		} {
			command(t, "sh", "-ec", c.command, root)
			h.later(2 * time.Minute)
			while := h.capacity()
			h.restart(local)
			h.later(2 * time.Minute)
			if after := h.capacity(); while > after+8*mib || while < after-8*mib {
				t.Errorf("after %s the capacity is %d MiB, and %d after a restart", c.what, while/mib, after/mib)
			}
		}
	})
}

// While quotas are inconsistent, what volumes with a limit were promised needs as many copies of trees as before: none of it is promised again.
func TestPromisesAreKeptWhileQuotasAreInconsistent(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.CountingBtrfs(t, 1<<30, "-m", "dup")
	withQuotas(t, root, local, func(t *testing.T, h *harness) {
		h.create("pvc-1", h.capacity())
		loseCount(t, root)
		h.later(2 * time.Minute)
		while := h.capacity()
		h.restart(local)
		if after := h.capacity(); while > 0 || after > 0 {
			t.Errorf("all was promised, and %d MiB more can be, after a restart %d", while/mib, after/mib)
		}
		inspected := h.inspect(local)[0]
		if inspected.AvailableBytes == nil || *inspected.AvailableBytes > 0 {
			t.Errorf("inspect has %+v", inspected)
		}
	})
}

// After some rescans Linux counts nothing, and says that all is consistent. A pool that requires enforcement is not served then, until quotas
// were switched off and on as the reason says, and no snapshot is made of a volume of which is not known what it holds.
func TestRescanAfterWhichNothingIsCounted(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	const required = `[{"name":"local","path":"pool","enforcement":"required"}]`
	root := testenv.CountingBtrfs(t, 512*mib)
	withQuotas(t, root, required, func(t *testing.T, h *harness) {
		h.create("pvc-1", 16*mib)
		h.later(time.Minute)
		command(t, "sh", "-ec", `mount -o remount,commit=1 "$0"
btrfs qgroup create 1/0 "$0"; btrfs subvolume create "$0/a"; head -c 5M /dev/zero >"$0/a/x"; sync -f "$0"
btrfs subvolume snapshot -i 1/0 "$0/a" "$0/b"; sync -f "$0"; btrfs subvolume delete "$0/b"; btrfs subvolume sync "$0"; sync -f "$0"
btrfs quota rescan -w "$0"; sync -f "$0"; touch "$0/others"`, root)
		must.Succeed(t, writeSynced(t, h.Path("pool", "pvc-1", "data"), 8*mib))
		err := h.snapshot("s-1", "pvc-1")
		h.later(2 * time.Minute)
		if why := h.Status()[0].Err; err != nil || why != nil { // as with Linux 6.18
			must.ErrorIs(t, err, volume.ErrPrecondition)
			_, commands, _ := strings.Cut(fmt.Sprint(why), ": run ")
			command(t, "sh", "-c", commands)
			command(t, "btrfs", "quota", "rescan", "-w", root)
		}
		h.later(2 * time.Minute)
		must.Succeed(t, h.Status()[0].Err)
		must.ErrorIs(t, writeSynced(t, h.Path("pool", "pvc-1", "more"), 32*mib), syscall.EDQUOT)
	})
}
