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

// A bench is a driver with one pool.
type bench struct {
	*drivertest.Driver
	pool *drivertest.Pool
	// copies: nothing shares blocks.
	copies bool
}

var filesystems = []struct {
	name        string
	mount       func(t *testing.T) string
	enforcement string
	copies      bool
}{
	{"xfs", func(t *testing.T) string { return testenv.LoopFS(t, "xfs", 1<<30) }, "auto", false},
	{"btrfs with limits", func(t *testing.T) string { return testenv.CountingBtrfs(t, 1<<30) }, "required", false},
	{"btrfs with simple quotas", func(t *testing.T) string { return testenv.SimpleBtrfs(t, 1<<30) }, "required", true},
	{"btrfs", func(t *testing.T) string { return testenv.MadeFS(t, "btrfs", 2<<30, "-m", "dup") }, "auto", false},
	{"ext4", func(t *testing.T) string { return testenv.LoopFS(t, "ext4", 1<<30) }, "auto", true},
}

var checks = []struct {
	name string
	run  func(b *bench)
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
			config := drivertest.PoolConfig{Name: "local", Path: mounted, Enforcement: fs.enforcement}
			d := drivertest.Start(t, drivertest.Config{Binary: driver, Pools: []drivertest.PoolConfig{config}, Flags: []string{"--v=4", drivertest.ServeMetrics}})
			b := &bench{Driver: d, pool: &drivertest.Pool{Driver: d, PoolConfig: config}, copies: fs.copies}
			for _, c := range checks {
				t.Run(c.name, func(t *testing.T) {
					b.TB = t
					c.run(b)
					if !t.Failed() {
						b.wantEmpty()
					}
				})
				if b.TB = t; t.Failed() {
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

func (b *bench) path(id string) string { return filepath.Join(b.pool.Path, id) }

func (b *bench) create(v drivertest.Volume) {
	b.Helper()
	_, err := b.Create(b.Context(), v)
	b.Must(err)
}

func (b *bench) delete(ids ...string) {
	b.Helper()
	for _, id := range ids {
		b.Must(b.Delete(b.Context(), id))
	}
}

func (b *bench) snapshot(name, of string) string {
	b.Helper()
	made, err := b.Snapshot(b.Context(), name, of, "")
	b.Must(err)
	if !made.GetReadyToUse() || made.GetSourceVolumeId() != of || made.GetSizeBytes() != size || made.GetCreationTime().AsTime().IsZero() {
		b.Errorf("the snapshot is %v", made)
	}
	return made.GetSnapshotId()
}

// wantEmpty expects nothing to be left of volumes and snapshots.
func (b *bench) wantEmpty() {
	b.Helper()
	b.pool.AwaitErased()
	list, err := b.Snapshots(b.Context(), "")
	if err != nil || len(list) > 0 {
		b.Errorf("snapshots are left: %v, %v", list, err)
	}
	for _, path := range []string{b.pool.Path, b.pool.Own("volumes"), b.pool.Own("snapshots"), b.pool.Own("creating", drivertest.NodeName)} {
		names, err := drivertest.Names(path)
		names = slices.DeleteFunc(names, func(name string) bool { return name == ".hostpath-provisioner" })
		if err != nil || len(names) > 0 {
			b.Errorf("%s holds %q, %v", path, names, err)
		}
	}
	b.Must(b.pool.Settle())
	b.Must(b.pool.Unleaked())
}

func restoresTree(b *bench) {
	b.create(directory("pvc-source", size))
	source := b.path("pvc-source")
	clonetest.Hostile(b, source)
	b.Must(os.Chown(source, 107, 107))
	kept := b.TempDir() // on another filesystem, to compare with after the source is gone
	clonetest.Copy(b, source, kept)
	id := b.snapshot("snapshot-1", "pvc-source")
	clonetest.Same(b, kept, b.pool.Own("snapshots", "~snapshot-1"))
	b.Must(os.WriteFile(filepath.Join(source, "later"), []byte("not in the snapshot"), 0o600))
	b.Must(os.WriteFile(filepath.Join(source, "file"), []byte("overwritten"), 0o600))
	clonetest.Same(b, kept, b.pool.Own("snapshots", "~snapshot-1"))
	b.delete("pvc-source")
	b.AwaitNoTrash(b.pool.Path)

	v := directory("pvc-restored", size)
	made, err := b.Restore(b.Context(), v, id)
	b.Must(err)
	if made.GetVolume().GetContentSource().GetSnapshot().GetSnapshotId() != id || made.GetVolume().GetCapacityBytes() != size {
		b.Errorf("the restored volume is %v", made)
	}
	clonetest.Same(b, kept, b.path("pvc-restored"))
	b.Must(b.DeleteSnapshot(b.Context(), id))
	b.AwaitNoTrash(b.pool.Path)
	clonetest.Same(b, kept, b.path("pvc-restored"))
	b.Must(b.Publish(b.Context(), v, "pod"))
	b.Must(os.WriteFile(filepath.Join(b.Target("pod"), "file"), []byte("written by a pod"), 0o600))
	b.Must(b.Unpublish(b.Context(), "pvc-restored", "pod"))
	b.delete("pvc-restored")
}

// pattern is so many bytes of which no block is as another.
func pattern(n int, salt string) []byte {
	var all bytes.Buffer
	for i := 0; all.Len() < n; i++ {
		all.WriteString(strings.Repeat(salt+string(rune('a'+i%26)), 100))
	}
	return all.Bytes()[:n]
}

func (b *bench) writeDisk(id string, at int64, data []byte) {
	b.Helper()
	f, err := os.OpenFile(b.pool.Image(id), os.O_WRONLY, 0)
	b.Must(err)
	_, err = f.WriteAt(data, at)
	b.Must(err)
	b.Must(f.Sync())
	b.Must(f.Close())
}

func (b *bench) wantDisk(path string, at int64, want []byte) {
	b.Helper()
	f, err := os.Open(path)
	b.Must(err)
	defer f.Close()
	got := make([]byte, len(want))
	if _, err := f.ReadAt(got, at); err != nil || !bytes.Equal(got, want) {
		b.Errorf("%s has other bytes at %d (%v)", path, at, err)
	}
}

func restoresDisk(b *bench) {
	b.create(disk("pvc-disk", size))
	before := pattern(3*mib, "before")
	b.writeDisk("pvc-disk", 64*mib, before)
	id := b.snapshot("snapshot-disk", "pvc-disk")
	b.writeDisk("pvc-disk", 64*mib, pattern(3*mib, "after"))
	b.delete("pvc-disk")
	b.AwaitNoTrash(b.pool.Path)
	for name, bytes := range map[string]int64{"pvc-same": size, "pvc-larger": size + 32*mib} {
		v := disk(name, bytes)
		_, err := b.Restore(b.Context(), v, id)
		b.Must(err)
		b.Must(b.pool.InOrder(drivertest.Kept{Volume: v}))
		b.Must(b.Publish(b.Context(), v, name))
		b.wantDisk(b.Target(name), 64*mib, before)
		b.wantDisk(b.Target(name), bytes-mib, make([]byte, mib))
		b.Must(b.Unpublish(b.Context(), name, name))
		b.delete(name)
	}
	_, err := b.Restore(b.Context(), disk("pvc-smaller", size-mib), id)
	b.WantCode("a smaller volume", err, codes.OutOfRange)
	_, err = b.Restore(b.Context(), directory("pvc-directory", size), id)
	b.WantCode("another mode", err, codes.InvalidArgument)
	b.Must(b.DeleteSnapshot(b.Context(), id))
}

func clones(b *bench) {
	b.create(directory("pvc-source", size))
	clonetest.Hostile(b, b.path("pvc-source"))
	_, err := b.Clone(b.Context(), directory("pvc-clone", 2*size), "pvc-source")
	b.Must(err)
	clonetest.Same(b, b.path("pvc-source"), b.path("pvc-clone"))
	b.Must(os.WriteFile(filepath.Join(b.path("pvc-clone"), "file"), []byte("of the clone"), 0o600))
	if got, err := os.ReadFile(filepath.Join(b.path("pvc-source"), "file")); err != nil || string(got) != "content" {
		b.Errorf("the source has %q, %v", got, err)
	}
	b.delete("pvc-source")
	b.delete("pvc-clone")
	_, err = b.Clone(b.Context(), directory("pvc-clone", size), "pvc-source")
	b.WantCode("a source that is gone", err, codes.NotFound)
	_, err = b.Clone(b.Context(), directory("pvc-source", size), "pvc-source")
	b.WantCode("a source that is gone and has the name of its clone", err, codes.NotFound)
}

func repeats(b *bench) {
	b.create(directory("pvc-a", size))
	b.create(directory("pvc-b", size))
	first, err := b.Snapshot(b.Context(), "snapshot-1", "pvc-a", "")
	b.Must(err)
	again, err := b.Snapshot(b.Context(), "snapshot-1", "pvc-a", "")
	if err != nil || !proto.Equal(first, again) {
		b.Errorf("the repeated call answered %v, %v; want %v", again, err, first)
	}
	_, err = b.Snapshot(b.Context(), "snapshot-1", "pvc-b", "")
	b.WantCode("the name for another source", err, codes.AlreadyExists)
	_, err = b.Snapshot(b.Context(), "snapshot-2", "pvc-none", "")
	b.WantCode("no source", err, codes.NotFound)
	_, err = b.Snapshot(b.Context(), "snapshot-2", "pvc-a", "sometimes")
	b.WantCode("a consistency that is not supported", err, codes.InvalidArgument)

	id := first.GetSnapshotId()
	v := directory("pvc-c", size)
	_, err = b.Restore(b.Context(), v, id)
	b.Must(err)
	b.Must(os.WriteFile(filepath.Join(b.path("pvc-c"), "written"), []byte("since"), 0o600))
	_, err = b.Restore(b.Context(), v, id)
	b.Must(err)
	if _, err := os.Stat(filepath.Join(b.path("pvc-c"), "written")); err != nil {
		b.Errorf("a repeated call copied again: %v", err)
	}
	_, err = b.Create(b.Context(), v)
	b.WantCode("the name without a source", err, codes.AlreadyExists)
	_, err = b.Clone(b.Context(), v, "pvc-a")
	b.WantCode("the name with another source", err, codes.AlreadyExists)
	_, err = b.Clone(b.Context(), directory("pvc-a", size), "pvc-b")
	b.WantCode("the name of an empty volume with a source", err, codes.AlreadyExists)
	_, err = b.Restore(b.Context(), directory("pvc-d", size), "snapshot-1@elsewhere")
	b.Must(err) // the disk was moved here
	_, err = b.Restore(b.Context(), directory("pvc-e", size), "snapshot-9@elsewhere")
	b.WantCode("a snapshot of another node", err, codes.ResourceExhausted)
	_, err = b.Restore(b.Context(), directory("pvc-e", size), "snapshot-9@"+drivertest.NodeName)
	b.WantCode("a snapshot that is gone", err, codes.NotFound)
	b.WantCode("deleting one of another node", b.DeleteSnapshot(b.Context(), "snapshot-9@elsewhere"), codes.FailedPrecondition)
	b.WantCode("deleting one that is gone", b.DeleteSnapshot(b.Context(), "snapshot-9@"+drivertest.NodeName), codes.OK)
	for of, want := range map[string]int{"": 1, "pvc-a": 1, "pvc-b": 0} {
		if list, err := b.Snapshots(b.Context(), of); err != nil || len(list) != want {
			b.Errorf("snapshots of %q: %v, %v; want %d", of, list, err, want)
		}
	}
	if listed, err := b.List(b.Context(), 0); err != nil || len(listed) != 4 {
		b.Errorf("volumes: %v, %v; want 4 and no snapshot", listed, err)
	}
	b.Must(b.DeleteSnapshot(b.Context(), id))
	b.delete("pvc-a", "pvc-b", "pvc-c", "pvc-d")
}

func snapshotsInUse(b *bench) {
	for _, v := range []drivertest.Volume{directory("pvc-used", size), disk("pvc-used", size)} {
		b.create(v)
		b.Must(b.Publish(b.Context(), v, "pod"))
		written := b.Target("pod")
		if !v.Block {
			written = filepath.Join(written, "file")
		}
		data := pattern(mib, "used")
		f, err := os.OpenFile(written, os.O_RDWR|os.O_CREATE, 0o600)
		b.Must(err)
		_, err = f.Write(data) // and no flush
		b.Must(err)
		_, err = b.Snapshot(b.Context(), "snapshot-used", v.ID, "")
		b.Must(f.Close())
		if b.copies {
			b.WantCode("a copy of what is published", err, codes.FailedPrecondition)
			b.Must(b.Unpublish(b.Context(), v.ID, "pod"))
			b.delete(v.ID)
			b.AwaitNoTrash(b.pool.Path)
			continue
		}
		b.Must(err)
		name := "file"
		if v.Block {
			name = "disk.img"
		}
		b.wantDisk(b.pool.Own("snapshots", "~snapshot-used", name), 0, data)
		if record, err := b.pool.Record("~snapshot-used"); err != nil || v.Block && record.Origin.Consistency != "crash-consistent" {
			b.Errorf("the snapshot of what is published is recorded as %+v, %v", record.Origin, err)
		}
		b.Must(b.Unpublish(b.Context(), v.ID, "pod"))
		b.delete(v.ID)
		b.Must(b.DeleteSnapshot(b.Context(), "snapshot-used@"+drivertest.NodeName))
		b.AwaitNoTrash(b.pool.Path)
	}
}

// snapshotsReadOnly makes a snapshot of a directory that is published read-only and nowhere else: no process writes, so that it can be
// copied where files share no blocks too.
func snapshotsReadOnly(b *bench) {
	v := directory("pvc-read", size)
	b.create(v)
	b.Must(os.WriteFile(filepath.Join(b.path(v.ID), "file"), []byte("content"), 0o600))
	b.Must(b.PublishReadOnly(b.Context(), v, "pod"))
	id := b.snapshot("snapshot-read", v.ID)
	if record, err := b.pool.Record("~snapshot-read"); err != nil || record.Origin.Consistency != "point-in-time" {
		b.Errorf("the snapshot is recorded as %+v, %v", record.Origin, err)
	}
	b.Must(b.DeleteSnapshot(b.Context(), id))
	b.Must(b.Unpublish(b.Context(), v.ID, "pod"))
	b.delete(v.ID)
	b.AwaitNoTrash(b.pool.Path)
}

// accounts expects the capacity to fall by what a snapshot and a restored volume are promised,
// and to come back when they are gone.
func accounts(b *bench) {
	b.create(directory("pvc-source", size))
	b.Must(os.WriteFile(filepath.Join(b.path("pvc-source"), "file"), pattern(32*mib, "held"), 0o600))
	b.Must(b.pool.Settle())
	before := b.capacity()
	id := b.snapshot("snapshot-1", "pvc-source")
	r, err := b.pool.Record("~snapshot-1")
	b.Must(err)
	least, most := int64(size), int64(size)
	if b.pool.Enforcement == "required" { // what it holds is counted
		least, most = 32*mib, 36*mib
	}
	if r.Bytes < least || r.Bytes > most {
		b.Errorf("the snapshot is promised %d bytes, want %d to %d", r.Bytes, least, most)
	}
	b.wantCapacity("with a snapshot", before-r.Bytes)
	_, err = b.Restore(b.Context(), directory("pvc-restored", size), id)
	b.Must(err)
	b.wantCapacity("with a restored volume", before-r.Bytes-size)
	foreign := b.path("foreign")
	if b.pool.Enforcement == "required" {
		b.seesForeignUse(foreign)
	}
	// A snapshot that does not fit is refused, and leaves nothing.
	filler := b.capacity() - 16*mib
	b.create(directory("pvc-filler", filler))
	_, err = b.Snapshot(b.Context(), "snapshot-2", "pvc-source", "")
	b.WantCode("a snapshot that does not fit", err, codes.FailedPrecondition)
	b.delete("pvc-restored", "pvc-filler")
	b.Must(os.RemoveAll(foreign))
	b.Must(b.DeleteSnapshot(b.Context(), id))
	b.AwaitNoTrash(b.pool.Path)
	b.Restart()
	b.wantCapacity("when both are gone", before)
	b.delete("pvc-source")
}

// seesForeignUse makes a file, and expects what it holds not to be hidden by entries that share blocks, each of which is
// charged for them.
func (b *bench) seesForeignUse(path string) {
	b.Helper()
	const foreign = 96 * mib
	before := b.capacity()
	f, err := os.Create(path)
	b.Must(err)
	_, err = f.Write(pattern(foreign, "foreign"))
	b.Must(errors.Join(err, f.Close(), b.pool.Settle())) // fsync(2) commits nothing, and btrfs counts when it commits
	b.Restart()                                          // it counts at once what it counts once a minute
	b.wantCapacity("with a file of others", before-foreign)
}

func (b *bench) capacity() int64 {
	b.Helper()
	got, err := b.Capacity(b.Context(), "local")
	b.Must(err)
	return got
}

// wantCapacity allows for what the filesystem takes for itself, and for how capacity is rounded.
func (b *bench) wantCapacity(when string, want int64) {
	b.Helper()
	const slack = 40 * mib // 32 of which a filesystem without limits may have for what a copy holds
	var got int64
	near := func() bool {
		b.Must(b.pool.Settle())
		got = b.capacity()
		return got > want-slack && got < want+slack
	}
	if b.Eventually(when, near); !near() {
		b.Errorf("%s the capacity is %d, want %d", when, got, want)
	}
}

func survivesRestart(b *bench) {
	b.create(directory("pvc-source", size))
	b.Must(os.WriteFile(filepath.Join(b.path("pvc-source"), "file"), []byte("content"), 0o600))
	id := b.snapshot("snapshot-1", "pvc-source")
	list, err := b.Snapshots(b.Context(), "")
	b.Must(err)
	for _, again := range []func(){b.Restart, b.Crash} {
		again()
		now, err := b.Snapshots(b.Context(), "")
		if err != nil || len(now) != 1 || !proto.Equal(now[0], list[0]) {
			b.Errorf("after a restart: %v, %v; want %v", now, err, list)
		}
	}
	b.delete("pvc-source")
	// A directory that is gone is reported, and the snapshot can be deleted.
	b.Must(os.RemoveAll(b.pool.Own("snapshots", "~snapshot-1")))
	if list, err = b.Snapshots(b.Context(), ""); err != nil || len(list) != 1 || list[0].GetReadyToUse() {
		b.Errorf("a lost snapshot is listed as %v, %v; want one that is not ready", list, err)
	}
	_, err = b.Restore(b.Context(), directory("pvc-restored", size), id)
	b.WantCode("restoring a lost snapshot", err, codes.NotFound)
	b.Must(b.DeleteSnapshot(b.Context(), id))
	b.forgetRemovedByHand()
}

// forgetRemovedByHand takes away the limit of a subvolume that was removed by hand, which the driver does within a minute.
func (b *bench) forgetRemovedByHand() {
	b.Helper()
	b.Must(b.pool.Settle())
	var fs unix.Statfs_t
	b.Must(unix.Statfs(b.pool.Path, &fs))
	if fs.Type == unix.BTRFS_SUPER_MAGIC {
		output, err := exec.CommandContext(b.Context(), "btrfs", "subvolume", "sync", b.pool.Path).CombinedOutput()
		if err != nil {
			b.Fatalf("btrfs subvolume sync: %v: %s", err, output)
		}
	}
	if err := b.pool.Unleaked(); err != nil {
		b.Log(err)
	}
}

// limitsStall has a class refuse a file that takes too long to share, where files are shared.
func limitsStall(b *bench) {
	b.create(directory("pvc-1", size))
	f, err := os.Create(filepath.Join(b.path("pvc-1"), "fragmented"))
	b.Must(err)
	for i := range int64(100) {
		_, err := f.WriteAt([]byte("x"), i*128<<10)
		b.Must(err)
	}
	b.Must(errors.Join(f.Sync(), f.Close()))
	ask := func(name, maxStall string) error {
		_, err := b.Controller().CreateSnapshot(b.Context(), &csi.CreateSnapshotRequest{
			Name: name, SourceVolumeId: "pvc-1", Parameters: map[string]string{"maxStall": maxStall},
		})
		return err
	}
	b.Must(ask("s-2", "1s")) // for 33,000 extents
	record, err := b.pool.Record("~s-2")
	b.Must(err)
	err = ask("s-1", "1ms") // for 33
	if record.Origin.Method != "reflink" {
		b.Must(err)
	} else if b.WantCode("a millisecond", err, codes.FailedPrecondition); !strings.Contains(err.Error(), "fragmented") || !strings.Contains(err.Error(), "maxStall") {
		b.Errorf("the refusal does not name the file and what to do: %v", err)
	}
	for _, name := range []string{"s-1", "s-2"} {
		b.Must(b.DeleteSnapshot(b.Context(), name+"@"+drivertest.NodeName))
	}
	b.delete("pvc-1")
}

// refusesLeased has a process keep a lease of a file, for which a copy would wait for as long as that process likes.
func refusesLeased(b *bench) {
	b.create(directory("pvc-1", size))
	f, err := os.Create(filepath.Join(b.path("pvc-1"), "leased"))
	b.Must(err)
	_, err = f.WriteString("content")
	b.Must(err)
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	b.Must(err)
	_, snapshotErr := b.Snapshot(b.Context(), "s-1", "pvc-1", "")
	_, cloneErr := b.Clone(b.Context(), directory("pvc-2", size), "pvc-1")
	b.Must(f.Close())
	b.Must(drivertest.Repeat(b.Context(), func() error { // what the refused one left is erased first
		_, err := b.Snapshot(b.Context(), "s-1", "pvc-1", "")
		return err
	}))
	record, err := b.pool.Record("~s-1")
	b.Must(err)
	for _, err := range []error{snapshotErr, cloneErr} {
		if record.Origin.Method == "subvolume" { // that opens no file
			b.Must(err)
		} else if b.WantCode("a leased file", err, codes.FailedPrecondition); !strings.Contains(err.Error(), "/leased") {
			b.Errorf("the refusal does not name the file: %v", err)
		}
	}
	b.Must(b.DeleteSnapshot(b.Context(), "s-1@"+drivertest.NodeName))
	b.delete("pvc-1", "pvc-2")
}

// copiesProtected has flags on what is in a volume, and on its root: snapshots, restores and clones can be made and erased.
func copiesProtected(b *bench) {
	testenv.NeedPrograms(b, "chattr")
	chattr := func(flag string, paths ...string) {
		b.Helper()
		for _, path := range paths {
			if out, err := exec.CommandContext(b.Context(), "chattr", flag, path).CombinedOutput(); err != nil {
				b.Fatalf("%v: %s", err, out)
			}
		}
	}
	for _, flag := range []string{"+i", "+a"} {
		b.create(directory("pvc-1", size))
		root := b.path("pvc-1")
		b.Must(os.MkdirAll(filepath.Join(root, "d", "e"), 0o755))
		file := filepath.Join(root, "d", "e", "file")
		b.Must(os.WriteFile(file, []byte("content"), 0o640))
		kept := b.TempDir()
		clonetest.Copy(b, root, kept)
		chattr(flag, file, filepath.Dir(file), filepath.Join(root, "d"), root)
		id := b.snapshot("s-1", "pvc-1")
		clonetest.Same(b, kept, b.pool.Own("snapshots", "~s-1"))
		_, err := b.Restore(b.Context(), directory("pvc-2", size), id)
		b.Must(err)
		clonetest.Same(b, kept, b.path("pvc-2"))
		_, err = b.Clone(b.Context(), directory("pvc-3", size), "pvc-1")
		b.Must(err)
		b.Must(b.DeleteSnapshot(b.Context(), id))
		b.delete("pvc-1", "pvc-2", "pvc-3")
		b.AwaitNoTrash(b.pool.Path)
	}
}

// cameWithoutRecord refuses a volume whose size is not known, until it is written down.
func cameWithoutRecord(b *bench) {
	b.Must(os.Mkdir(b.path("pvc-came"), 0o777))
	b.Must(os.WriteFile(filepath.Join(b.path("pvc-came"), "file"), []byte("content"), 0o600))
	_, err := b.Snapshot(b.Context(), "s-1", "pvc-came", "")
	if b.WantCode("without a record", err, codes.FailedPrecondition); !strings.Contains(err.Error(), "has no record of its size") {
		b.Errorf("the refusal does not say why: %v", err)
	}
	record := fmt.Sprintf(`{"version":1,"id":"pvc-came","uid":"byhand","mode":"mount","bytes":%d,"created":"2026-11-20T18:56:54Z"}`+"\n", size)
	b.Must(os.WriteFile(b.pool.Own("volumes", "pvc-came.json"), []byte(record), 0o600))
	b.Restart()
	id := b.snapshot("s-1", "pvc-came")
	b.Must(os.WriteFile(filepath.Join(b.path("pvc-came"), "later"), nil, 0o600))
	_, err = b.Restore(b.Context(), directory("pvc-restored", size), id)
	b.Must(err)
	names, err := drivertest.Names(b.path("pvc-restored"))
	if err != nil || !slices.Equal(names, []string{"file"}) {
		b.Errorf("the restored volume has %q, %v", names, err)
	}
	b.delete("pvc-came", "pvc-restored")
	b.Must(b.DeleteSnapshot(b.Context(), id))
}

// The kernel does not note stores through mappings in files of a tmpfs: no copy of what changes is known to be of one moment.
func TestFreezeOnTmpfsIsRefused(t *testing.T) {
	config := drivertest.PoolConfig{Name: "local", Path: testenv.Tmpfs(t, 512*mib)}
	d := drivertest.Start(t, drivertest.Config{Binary: drivertest.Built(t), Pools: []drivertest.PoolConfig{config}})
	b := &bench{Driver: d, pool: &drivertest.Pool{Driver: d, PoolConfig: config}, copies: true}
	v := directory("pvc-1", size)
	b.create(v)
	_, err := b.Snapshot(b.Context(), "s-1", v.ID, "freeze")
	b.WantCode("a snapshot with freeze", err, codes.FailedPrecondition)
	b.Must(b.DeleteSnapshot(b.Context(), b.snapshot("s-1", v.ID)))
	b.delete(v.ID)
}
