// Package snapshots tests snapshots, restores and clones with the real program on real
// filesystems: on XFS, whose files share blocks, on btrfs with its limits, which has snapshots of
// its own, and on ext4, where all is copied.
package snapshots

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

func TestMain(m *testing.M) {
	trap.Launch()
	testenv.Main(m)
}

const (
	mib  = 1 << 20
	size = 128 * mib
)

// A harness is a driver with one pool.
type harness struct {
	*drivertest.Driver
	pool *drivertest.Pool
	// copies: nothing shares blocks; disksCopied: no block volume does.
	copies, disksCopied bool
}

// newHarness starts a driver on a pool.
func newHarness(t *testing.T, program, pool, enforcement string, flags ...string) *harness {
	t.Helper()
	config := drivertest.PoolConfig{Name: "local", Path: pool, Enforcement: enforcement}
	d := drivertest.Start(t, drivertest.Config{Binary: program, Pools: []drivertest.PoolConfig{config}, Flags: flags})
	return &harness{Driver: d, pool: &drivertest.Pool{Driver: d, PoolConfig: config}}
}

var filesystems = []struct {
	name        string
	mount       func(t *testing.T) string
	enforcement string
	copies      bool
}{
	{"xfs", func(t *testing.T) string { return testenv.LoopFS(t, "xfs", 1<<30) }, "auto", false},
	{"btrfs with limits", func(t *testing.T) string { return testenv.CountingBtrfs(t, 1<<30) }, "required", false},
	{"btrfs", func(t *testing.T) string { return testenv.MadeFS(t, "btrfs", 2<<30, "-m", "dup") }, "auto", false},
	{"ext4", func(t *testing.T) string { return testenv.LoopFS(t, "ext4", 1<<30) }, "auto", true},
}

var checks = []struct {
	name string
	run  func(b *harness)
}{
	{"a tree is restored as it was, also after its volume is deleted", restoresTree},
	{"a disk is restored as it was, also to a larger one", restoresDisk},
	{"a clone is a volume of its own", clones},
	{"repeated and conflicting calls", repeats},
	{"a volume in use", snapshotsInUse},
	{"a volume that can only be read", snapshotsReadOnly},
	{"a file of many extents", limitsStall},
	{"a file with a write lease", refusesLeased},
	{"what a pod has made immutable", copiesProtected},
	{"a volume that came without a record", cameWithoutRecord},
	{"what is promised is kept and given back", accounts},
	{"a restart keeps what was made", survivesRestart},
}

func TestSnapshots(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "rsync")
	driver := drivertest.Built(t)
	for _, fs := range filesystems {
		t.Run(fs.name, func(t *testing.T) {
			mounted := fs.mount(t)
			h := newHarness(t, driver, mounted, fs.enforcement, "--v=4", drivertest.ServeMetrics)
			h.copies, h.disksCopied = fs.copies, fs.name == "btrfs"
			for _, c := range checks {
				t.Run(c.name, func(t *testing.T) {
					h.TB = t
					c.run(h)
					if !t.Failed() {
						h.wantEmpty()
					}
				})
				if h.TB = t; t.Failed() {
					return // the others would start from what is wrong
				}
			}
		})
	}
}

func directory(id string, bytes int64) drivertest.Volume {
	return drivertest.Volume{ID: id, Pool: "local", Bytes: bytes}
}

func disk(id string, bytes int64) drivertest.Volume {
	return drivertest.Volume{ID: id, Pool: "local", Block: true, Bytes: bytes}
}

func (h *harness) path(id string) string { return filepath.Join(h.pool.Path, id) }

func (h *harness) delete(ids ...string) {
	h.Helper()
	for _, id := range ids {
		h.Must(h.Delete(h.Context(), id))
	}
}

func (h *harness) snapshot(name, of string) string {
	h.Helper()
	made, err := h.Snapshot(h.Context(), name, of, "")
	h.Must(err)
	if !made.GetReadyToUse() || made.GetSourceVolumeId() != of || made.GetSizeBytes() != size || made.GetCreationTime().AsTime().IsZero() {
		h.Errorf("the snapshot is %v", made)
	}
	return made.GetSnapshotId()
}

// wantEmpty expects nothing to be left of volumes and snapshots.
func (h *harness) wantEmpty() {
	h.Helper()
	h.pool.AwaitErased()
	list, err := h.Snapshots(h.Context(), "")
	if err != nil || len(list) > 0 {
		h.Errorf("snapshots are left: %v, %v", list, err)
	}
	for _, path := range []string{h.pool.Path, h.pool.Own("volumes"), h.pool.Own("snapshots"), h.pool.Own("creating", drivertest.NodeName)} {
		names, err := drivertest.Names(path)
		names = slices.DeleteFunc(names, func(name string) bool { return name == ".hostpath-provisioner" })
		if err != nil || len(names) > 0 {
			h.Errorf("%s holds %q, %v", path, names, err)
		}
	}
	h.Must(h.pool.Settle())
	h.Must(h.pool.Unleaked())
}

func restoresTree(h *harness) {
	h.MustCreate(directory("pvc-source", size))
	source := h.path("pvc-source")
	clonetest.Hostile(h, source)
	h.Must(os.Chown(source, 107, 107))
	kept := h.TempDir() // on another filesystem, to compare with after the source is gone
	clonetest.Copy(h, source, kept)
	id := h.snapshot("snapshot-1", "pvc-source")
	clonetest.Same(h, kept, h.pool.Own("snapshots", "~snapshot-1"))
	h.Must(os.WriteFile(filepath.Join(source, "later"), []byte("not in the snapshot"), 0o600))
	h.Must(os.WriteFile(filepath.Join(source, "file"), []byte("overwritten"), 0o600))
	clonetest.Same(h, kept, h.pool.Own("snapshots", "~snapshot-1"))
	h.delete("pvc-source")
	h.AwaitNoTrash(h.pool.Path)

	v := directory("pvc-restored", size)
	made, err := h.Restore(h.Context(), v, id)
	h.Must(err)
	if made.GetVolume().GetContentSource().GetSnapshot().GetSnapshotId() != id || made.GetVolume().GetCapacityBytes() != size {
		h.Errorf("the restored volume is %v", made)
	}
	clonetest.Same(h, kept, h.path("pvc-restored"))
	h.Must(h.DeleteSnapshot(h.Context(), id))
	h.AwaitNoTrash(h.pool.Path)
	clonetest.Same(h, kept, h.path("pvc-restored"))
	h.Must(h.Publish(h.Context(), v, "pod"))
	h.Must(os.WriteFile(filepath.Join(h.Target("pod"), "file"), []byte("written by a pod"), 0o600))
	h.Must(h.Unpublish(h.Context(), "pvc-restored", "pod"))
	h.delete("pvc-restored")
}

// pattern is so many bytes of which no block is as another.
func pattern(n int, salt string) []byte {
	var all bytes.Buffer
	for i := 0; all.Len() < n; i++ {
		all.WriteString(strings.Repeat(salt+string(rune('a'+i%26)), 100))
	}
	return all.Bytes()[:n]
}

func (h *harness) writeDisk(id string, at int64, data []byte) {
	h.Helper()
	f, err := os.OpenFile(h.pool.Image(id), os.O_WRONLY, 0)
	h.Must(err)
	_, err = f.WriteAt(data, at)
	h.Must(err)
	h.Must(f.Sync())
	h.Must(f.Close())
}

func (h *harness) wantDisk(path string, at int64, want []byte) {
	h.Helper()
	f, err := os.Open(path)
	h.Must(err)
	defer f.Close()
	got := make([]byte, len(want))
	if _, err := f.ReadAt(got, at); err != nil || !bytes.Equal(got, want) {
		h.Errorf("%s has other bytes at %d (%v)", path, at, err)
	}
}

func restoresDisk(h *harness) {
	h.MustCreate(disk("pvc-disk", size))
	before := pattern(3*mib, "before")
	h.writeDisk("pvc-disk", 64*mib, before)
	id := h.snapshot("snapshot-disk", "pvc-disk")
	h.writeDisk("pvc-disk", 64*mib, pattern(3*mib, "after"))
	h.delete("pvc-disk")
	h.AwaitNoTrash(h.pool.Path)
	for name, bytes := range map[string]int64{"pvc-same": size, "pvc-larger": size + 32*mib} {
		v := disk(name, bytes)
		_, err := h.Restore(h.Context(), v, id)
		h.Must(err)
		h.Must(h.pool.InOrder(drivertest.Kept{Volume: v}))
		h.Must(h.Publish(h.Context(), v, name))
		h.wantDisk(h.Target(name), 64*mib, before)
		h.wantDisk(h.Target(name), bytes-mib, make([]byte, mib))
		h.Must(h.Unpublish(h.Context(), name, name))
		h.delete(name)
	}
	_, err := h.Restore(h.Context(), disk("pvc-smaller", size-mib), id)
	h.WantCode("a smaller volume", err, codes.OutOfRange)
	_, err = h.Restore(h.Context(), directory("pvc-directory", size), id)
	h.WantCode("another mode", err, codes.InvalidArgument)
	h.Must(h.DeleteSnapshot(h.Context(), id))
}

func clones(h *harness) {
	h.MustCreate(directory("pvc-source", size))
	clonetest.Hostile(h, h.path("pvc-source"))
	_, err := h.Clone(h.Context(), directory("pvc-clone", 2*size), "pvc-source")
	h.Must(err)
	clonetest.Same(h, h.path("pvc-source"), h.path("pvc-clone"))
	h.Must(os.WriteFile(filepath.Join(h.path("pvc-clone"), "file"), []byte("of the clone"), 0o600))
	if got, err := os.ReadFile(filepath.Join(h.path("pvc-source"), "file")); err != nil || string(got) != "content" {
		h.Errorf("the source has %q, %v", got, err)
	}
	h.delete("pvc-source")
	h.delete("pvc-clone")
	_, err = h.Clone(h.Context(), directory("pvc-clone", size), "pvc-source")
	h.WantCode("a source that is gone", err, codes.NotFound)
	_, err = h.Clone(h.Context(), directory("pvc-source", size), "pvc-source")
	h.WantCode("a source that is gone and has the name of its clone", err, codes.NotFound)
}

func repeats(h *harness) {
	h.MustCreate(directory("pvc-a", size))
	h.MustCreate(directory("pvc-b", size))
	first, err := h.Snapshot(h.Context(), "snapshot-1", "pvc-a", "")
	h.Must(err)
	again, err := h.Snapshot(h.Context(), "snapshot-1", "pvc-a", "")
	if err != nil || !proto.Equal(first, again) {
		h.Errorf("the repeated call answered %v, %v; want %v", again, err, first)
	}
	_, err = h.Snapshot(h.Context(), "snapshot-1", "pvc-b", "")
	h.WantCode("the name for another source", err, codes.AlreadyExists)
	_, err = h.Snapshot(h.Context(), "snapshot-2", "pvc-none", "")
	h.WantCode("no source", err, codes.NotFound)
	_, err = h.Snapshot(h.Context(), "snapshot-2", "pvc-a", "sometimes")
	h.WantCode("a consistency that is not supported", err, codes.InvalidArgument)

	id := first.GetSnapshotId()
	v := directory("pvc-c", size)
	_, err = h.Restore(h.Context(), v, id)
	h.Must(err)
	h.Must(os.WriteFile(filepath.Join(h.path("pvc-c"), "written"), []byte("since"), 0o600))
	_, err = h.Restore(h.Context(), v, id)
	h.Must(err)
	if _, err := os.Stat(filepath.Join(h.path("pvc-c"), "written")); err != nil {
		h.Errorf("a repeated call copied again: %v", err)
	}
	_, err = h.Create(h.Context(), v)
	h.WantCode("the name without a source", err, codes.AlreadyExists)
	_, err = h.Clone(h.Context(), v, "pvc-a")
	h.WantCode("the name with another source", err, codes.AlreadyExists)
	_, err = h.Clone(h.Context(), directory("pvc-a", size), "pvc-b")
	h.WantCode("the name of an empty volume with a source", err, codes.AlreadyExists)
	_, err = h.Restore(h.Context(), directory("pvc-d", size), "snapshot-1@elsewhere")
	h.Must(err) // the disk was moved here
	_, err = h.Restore(h.Context(), directory("pvc-e", size), "snapshot-9@elsewhere")
	h.WantCode("a snapshot of another node", err, codes.ResourceExhausted)
	_, err = h.Restore(h.Context(), directory("pvc-e", size), "snapshot-9@"+drivertest.NodeName)
	h.WantCode("a snapshot that is gone", err, codes.NotFound)
	h.WantCode("deleting one of another node", h.DeleteSnapshot(h.Context(), "snapshot-9@elsewhere"), codes.FailedPrecondition)
	h.WantCode("deleting one that is gone", h.DeleteSnapshot(h.Context(), "snapshot-9@"+drivertest.NodeName), codes.OK)
	for of, want := range map[string]int{"": 1, "pvc-a": 1, "pvc-b": 0} {
		if list, err := h.Snapshots(h.Context(), of); err != nil || len(list) != want {
			h.Errorf("snapshots of %q: %v, %v; want %d", of, list, err, want)
		}
	}
	if listed, err := h.List(h.Context(), 0); err != nil || len(listed) != 4 {
		h.Errorf("volumes: %v, %v; want 4 and no snapshot", listed, err)
	}
	h.Must(h.DeleteSnapshot(h.Context(), id))
	h.delete("pvc-a", "pvc-b", "pvc-c", "pvc-d")
}

func snapshotsInUse(h *harness) {
	for _, v := range []drivertest.Volume{directory("pvc-used", size), disk("pvc-used", size)} {
		h.MustCreate(v)
		h.Must(h.Publish(h.Context(), v, "pod"))
		written := h.Target("pod")
		if !v.Block {
			written = filepath.Join(written, "file")
		}
		data := pattern(mib, "used")
		f, err := os.OpenFile(written, os.O_RDWR|os.O_CREATE, 0o600)
		h.Must(err)
		_, err = f.Write(data) // and no flush
		h.Must(err)
		_, err = h.Snapshot(h.Context(), "snapshot-used", v.ID, "")
		h.Must(f.Close())
		if h.copies || v.Block && h.disksCopied {
			h.WantCode("a copy of what is published", err, codes.FailedPrecondition)
			h.Must(h.Unpublish(h.Context(), v.ID, "pod"))
			h.delete(v.ID)
			h.AwaitNoTrash(h.pool.Path)
			continue
		}
		h.Must(err)
		name := "file"
		if v.Block {
			name = "disk.img"
		}
		h.wantDisk(h.pool.Own("snapshots", "~snapshot-used", name), 0, data)
		want := "crash-consistent" // all of it at one moment
		if !v.Block && h.pool.Enforcement != "required" {
			want = "point-in-time" // of a directory in no subvolume, walked until nothing changed
		}
		if record, err := h.pool.Record("~snapshot-used"); err != nil || record.Origin.Consistency != want {
			h.Errorf("the snapshot of what is published, block is %t, is recorded as %+v, %v, want %q", v.Block, record.Origin, err, want)
		}
		h.Must(h.Unpublish(h.Context(), v.ID, "pod"))
		h.delete(v.ID)
		h.Must(h.DeleteSnapshot(h.Context(), "snapshot-used@"+drivertest.NodeName))
		h.AwaitNoTrash(h.pool.Path)
	}
}

// snapshotsReadOnly makes a snapshot of a directory that is published read-only and nowhere else: no process writes, so that it can be
// copied where files share no blocks too.
func snapshotsReadOnly(h *harness) {
	v := directory("pvc-read", size)
	h.MustCreate(v)
	h.Must(os.WriteFile(filepath.Join(h.path(v.ID), "file"), []byte("content"), 0o600))
	h.Must(h.PublishReadOnly(h.Context(), v, "pod"))
	id := h.snapshot("snapshot-read", v.ID)
	if record, err := h.pool.Record("~snapshot-read"); err != nil || record.Origin.Consistency != "point-in-time" {
		h.Errorf("the snapshot is recorded as %+v, %v", record.Origin, err)
	}
	h.Must(h.DeleteSnapshot(h.Context(), id))
	h.Must(h.Unpublish(h.Context(), v.ID, "pod"))
	h.delete(v.ID)
	h.AwaitNoTrash(h.pool.Path)
}

// accounts expects the capacity to fall by what a snapshot and a restored volume are promised,
// and to come back when they are gone.
func accounts(h *harness) {
	h.MustCreate(directory("pvc-source", size))
	h.Must(os.WriteFile(filepath.Join(h.path("pvc-source"), "file"), pattern(32*mib, "held"), 0o600))
	h.Must(h.pool.Settle())
	before := h.MustCapacity("local")
	id := h.snapshot("snapshot-1", "pvc-source")
	r, err := h.pool.Record("~snapshot-1")
	h.Must(err)
	least, most := int64(size), int64(size)
	if h.pool.Enforcement == "required" { // what it holds is counted
		least, most = 32*mib, 36*mib
	}
	if r.Bytes < least || r.Bytes > most {
		h.Errorf("the snapshot is promised %d bytes, want %d to %d", r.Bytes, least, most)
	}
	h.wantCapacity("with a snapshot", before-r.Bytes)
	_, err = h.Restore(h.Context(), directory("pvc-restored", size), id)
	h.Must(err)
	h.wantCapacity("with a restored volume", before-r.Bytes-size)
	foreign := h.path("foreign")
	if h.pool.Enforcement == "required" {
		h.seesForeignUse(foreign)
	}
	// A snapshot that does not fit is refused, and leaves nothing.
	filler := h.MustCapacity("local") - 16*mib
	h.MustCreate(directory("pvc-filler", filler))
	_, err = h.Snapshot(h.Context(), "snapshot-2", "pvc-source", "")
	h.WantCode("a snapshot that does not fit", err, codes.FailedPrecondition)
	h.delete("pvc-restored", "pvc-filler")
	h.Must(os.RemoveAll(foreign))
	h.Must(h.DeleteSnapshot(h.Context(), id))
	h.AwaitNoTrash(h.pool.Path)
	h.Restart()
	h.wantCapacity("when both are gone", before)
	h.delete("pvc-source")
}

// seesForeignUse makes a file, and expects what it holds not to be hidden by entries that share blocks, each of which is
// charged for them.
func (h *harness) seesForeignUse(path string) {
	h.Helper()
	const foreign = 96 * mib
	before := h.MustCapacity("local")
	f, err := os.Create(path)
	h.Must(err)
	_, err = f.Write(pattern(foreign, "foreign"))
	h.Must(errors.Join(err, f.Close(), h.pool.Settle())) // fsync(2) commits nothing, and btrfs counts when it commits
	h.Restart()                                          // it counts at once what it counts once a minute
	h.wantCapacity("with a file of others", before-foreign)
}

// wantCapacity allows for what the filesystem takes for itself, and for how capacity is rounded.
func (h *harness) wantCapacity(when string, want int64) {
	h.Helper()
	const slack = 40 * mib // 32 of which a filesystem without limits may have for what a copy holds
	var got int64
	near := func() bool {
		h.Must(h.pool.Settle())
		got = h.MustCapacity("local")
		return got > want-slack && got < want+slack
	}
	if h.Eventually(when, near); !near() {
		h.Errorf("%s the capacity is %d, want %d", when, got, want)
	}
}

func survivesRestart(h *harness) {
	h.MustCreate(directory("pvc-source", size))
	h.Must(os.WriteFile(filepath.Join(h.path("pvc-source"), "file"), []byte("content"), 0o600))
	id := h.snapshot("snapshot-1", "pvc-source")
	list, err := h.Snapshots(h.Context(), "")
	h.Must(err)
	for _, again := range []func(){h.Restart, h.Crash} {
		again()
		now, err := h.Snapshots(h.Context(), "")
		if err != nil || len(now) != 1 || !proto.Equal(now[0], list[0]) {
			h.Errorf("after a restart: %v, %v; want %v", now, err, list)
		}
	}
	h.delete("pvc-source")
	// A directory that is gone is reported, and the snapshot can be deleted.
	h.Must(os.RemoveAll(h.pool.Own("snapshots", "~snapshot-1")))
	if list, err = h.Snapshots(h.Context(), ""); err != nil || len(list) != 1 || list[0].GetReadyToUse() {
		h.Errorf("a lost snapshot is listed as %v, %v; want one that is not ready", list, err)
	}
	_, err = h.Restore(h.Context(), directory("pvc-restored", size), id)
	h.WantCode("restoring a lost snapshot", err, codes.NotFound)
	h.Must(h.DeleteSnapshot(h.Context(), id))
	h.forgetRemovedByHand()
}

// forgetRemovedByHand takes away the limit of a subvolume that was removed by hand, which the driver does within a minute.
func (h *harness) forgetRemovedByHand() {
	h.Helper()
	h.Must(h.pool.Settle())
	var fs unix.Statfs_t
	h.Must(unix.Statfs(h.pool.Path, &fs))
	if fs.Type == unix.BTRFS_SUPER_MAGIC {
		output, err := exec.CommandContext(h.Context(), "btrfs", "subvolume", "sync", h.pool.Path).CombinedOutput()
		if err != nil {
			h.Fatalf("btrfs subvolume sync: %v: %s", err, output)
		}
	}
	if err := h.pool.Unleaked(); err != nil {
		h.Log(err)
	}
}

// limitsStall has a class refuse a file that takes too long to share, where files are shared.
func limitsStall(h *harness) {
	h.MustCreate(directory("pvc-1", size))
	f, err := os.Create(filepath.Join(h.path("pvc-1"), "fragmented"))
	h.Must(err)
	for i := range int64(100) {
		_, err := f.WriteAt([]byte("x"), i*128<<10)
		h.Must(err)
	}
	h.Must(errors.Join(f.Sync(), f.Close()))
	ask := func(name, maxStall string) error {
		_, err := h.Controller().CreateSnapshot(h.Context(), &csi.CreateSnapshotRequest{
			Name: name, SourceVolumeId: "pvc-1", Parameters: map[string]string{"maxStall": maxStall},
		})
		return err
	}
	h.Must(ask("s-2", "1s")) // for 33,000 extents
	record, err := h.pool.Record("~s-2")
	h.Must(err)
	err = ask("s-1", "1ms") // for 33
	if record.Origin.Method != "reflink" {
		h.Must(err)
	} else if h.WantCode("a millisecond", err, codes.FailedPrecondition); !strings.Contains(err.Error(), "fragmented") || !strings.Contains(err.Error(), "maxStall") {
		h.Errorf("the refusal does not name the file and what to do: %v", err)
	}
	for _, name := range []string{"s-1", "s-2"} {
		h.Must(h.DeleteSnapshot(h.Context(), name+"@"+drivertest.NodeName))
	}
	h.delete("pvc-1")
}

// refusesLeased has a process keep a lease of a file, for which a copy would wait for as long as that process likes.
func refusesLeased(h *harness) {
	h.MustCreate(directory("pvc-1", size))
	f, err := os.Create(filepath.Join(h.path("pvc-1"), "leased"))
	h.Must(err)
	_, err = f.WriteString("content")
	h.Must(err)
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	h.Must(err)
	_, snapshotErr := h.Snapshot(h.Context(), "s-1", "pvc-1", "")
	_, cloneErr := h.Clone(h.Context(), directory("pvc-2", size), "pvc-1")
	h.Must(f.Close())
	h.Must(drivertest.Repeat(h.Context(), func() error { // what the refused one left is erased first
		_, err := h.Snapshot(h.Context(), "s-1", "pvc-1", "")
		return err
	}))
	record, err := h.pool.Record("~s-1")
	h.Must(err)
	for _, err := range []error{snapshotErr, cloneErr} {
		if record.Origin.Method == "subvolume" { // that opens no file
			h.Must(err)
		} else if h.WantCode("a leased file", err, codes.FailedPrecondition); !strings.Contains(err.Error(), "/leased") {
			h.Errorf("the refusal does not name the file: %v", err)
		}
	}
	h.Must(h.DeleteSnapshot(h.Context(), "s-1@"+drivertest.NodeName))
	h.delete("pvc-1", "pvc-2")
}

// copiesProtected has flags on what is in a volume, and on its root: snapshots, restores and clones can be made and erased.
func copiesProtected(h *harness) {
	testenv.NeedPrograms(h, "chattr")
	chattr := func(flag string, paths ...string) {
		h.Helper()
		for _, path := range paths {
			if out, err := exec.CommandContext(h.Context(), "chattr", flag, path).CombinedOutput(); err != nil {
				h.Fatalf("%v: %s", err, out)
			}
		}
	}
	for _, flag := range []string{"+i", "+a"} {
		h.MustCreate(directory("pvc-1", size))
		root := h.path("pvc-1")
		h.Must(os.MkdirAll(filepath.Join(root, "d", "e"), 0o755))
		file := filepath.Join(root, "d", "e", "file")
		h.Must(os.WriteFile(file, []byte("content"), 0o640))
		kept := h.TempDir()
		clonetest.Copy(h, root, kept)
		chattr(flag, file, filepath.Dir(file), filepath.Join(root, "d"), root)
		id := h.snapshot("s-1", "pvc-1")
		clonetest.Same(h, kept, h.pool.Own("snapshots", "~s-1"))
		_, err := h.Restore(h.Context(), directory("pvc-2", size), id)
		h.Must(err)
		clonetest.Same(h, kept, h.path("pvc-2"))
		_, err = h.Clone(h.Context(), directory("pvc-3", size), "pvc-1")
		h.Must(err)
		h.Must(h.DeleteSnapshot(h.Context(), id))
		h.delete("pvc-1", "pvc-2", "pvc-3")
		h.AwaitNoTrash(h.pool.Path)
	}
}

// cameWithoutRecord refuses a volume whose size is not known, until it is written down.
func cameWithoutRecord(h *harness) {
	h.Must(os.Mkdir(h.path("pvc-came"), 0o777))
	h.Must(os.WriteFile(filepath.Join(h.path("pvc-came"), "file"), []byte("content"), 0o600))
	_, err := h.Snapshot(h.Context(), "s-1", "pvc-came", "")
	if h.WantCode("without a record", err, codes.FailedPrecondition); !strings.Contains(err.Error(), "has no record of its size") {
		h.Errorf("the refusal does not say why: %v", err)
	}
	record := fmt.Sprintf(`{"version":1,"id":"pvc-came","uid":"byhand","mode":"mount","bytes":%d,"created":"2026-11-20T18:56:54Z"}`+"\n", size)
	h.Must(os.WriteFile(h.pool.Own("volumes", "pvc-came.json"), []byte(record), 0o600))
	h.Restart()
	id := h.snapshot("s-1", "pvc-came")
	h.Must(os.WriteFile(filepath.Join(h.path("pvc-came"), "later"), nil, 0o600))
	_, err = h.Restore(h.Context(), directory("pvc-restored", size), id)
	h.Must(err)
	names, err := drivertest.Names(h.path("pvc-restored"))
	if err != nil || !slices.Equal(names, []string{"file"}) {
		h.Errorf("the restored volume has %q, %v", names, err)
	}
	h.delete("pvc-came", "pvc-restored")
	h.Must(h.DeleteSnapshot(h.Context(), id))
}

// The kernel does not note stores through mappings in files of a tmpfs: no copy of what changes is known to be of one moment.
func TestFreezeOnTmpfsIsRefused(t *testing.T) {
	h := newHarness(t, drivertest.Built(t), testenv.Tmpfs(t, 512*mib), "")
	h.copies = true
	v := directory("pvc-1", size)
	h.MustCreate(v)
	_, err := h.Snapshot(h.Context(), "s-1", v.ID, "freeze")
	h.WantCode("a snapshot with freeze", err, codes.FailedPrecondition)
	h.Must(h.DeleteSnapshot(h.Context(), h.snapshot("s-1", v.ID)))
	h.delete(v.ID)
}
