package volumes

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
)

const mib = 1 << 20

// A bench is a driver with one pool, and what of it a check has in use.
type bench struct {
	*drivertest.Driver
	fs       filesystem
	program  string
	mounted  string
	pool     string
	facility quota.Facility
	root     *dir.Dir // of the pool

	ids map[string]quota.ID // of the volumes that were made
}

// newBench starts a driver on an empty pool whose sizes it has to keep.
func newBench(t *testing.T, program string, fs filesystem, mounted string) *bench {
	t.Helper()
	b := &bench{fs: fs, program: program, mounted: mounted, ids: make(map[string]quota.ID)}
	var err error
	b.pool, err = os.MkdirTemp(mounted, "pool-") //nolint:usetesting // t.TempDir is on another filesystem
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, os.RemoveAll(b.pool)) })
	b.root, err = dir.Open(b.pool)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, b.root.Close()) })
	b.facility, err = quota.Detect(b.root)
	must.Succeed(t, err)
	if b.facility.Kind() != fs.kind {
		t.Fatalf("the limits of %s are kept by %s, want %s", mounted, b.facility.Kind(), fs.kind)
	}
	b.Driver = drivertest.Start(t, b.config("root"))
	return b
}

// config runs the driver on the pool; relabel is the pool option of that name.
func (b *bench) config(relabel string) drivertest.Config {
	return drivertest.Config{
		Binary: b.program,
		Pools:  []drivertest.PoolConfig{{Name: "local", Path: b.pool, Enforcement: "required", Relabel: relabel, Reserve: b.fs.reserve}},
	}
}

func volume(name string, bytes int64) drivertest.Volume {
	return drivertest.Volume{ID: name, Pool: "local", Bytes: bytes}
}

// create makes a volume and expects the driver to report that its size is enforced.
func (b *bench) create(name string, bytes int64) {
	b.Helper()
	b.Must(b.tryCreate(name, bytes))
	b.ids[name] = b.idOf(name)
}

func (b *bench) tryCreate(name string, bytes int64) error {
	made, err := b.Create(b.Context(), volume(name, bytes))
	v := made.GetVolume()
	if err == nil && (v.GetVolumeId() != name || v.GetCapacityBytes() != bytes || v.GetVolumeContext()["sizeEnforced"] != "true") {
		b.Errorf("the driver made %v, want %s with %d bytes, enforced", v, name, bytes)
	}
	return err
}

func (b *bench) delete(name string) error { return b.Delete(b.Context(), name) }

// publish publishes as kubelet does, and answers the path.
func (b *bench) publish(name, pod string) string {
	b.Helper()
	b.Must(b.Publish(b.Context(), volume(name, 0), pod))
	return b.Target(pod)
}

func (b *bench) unpublish(name, pod string) {
	b.Helper()
	b.Must(b.Unpublish(b.Context(), name, pod))
}

func (b *bench) expand(name, pod string, bytes int64) error {
	grown, err := b.Expand(b.Context(), volume(name, bytes), pod)
	if err == nil && grown.GetCapacityBytes() != bytes {
		b.Errorf("the volume has %d bytes, want %d", grown.GetCapacityBytes(), bytes)
	}
	return err
}

// condition is what the driver says of a volume.
func (b *bench) condition(name string) *oldcsi.VolumeCondition {
	b.Helper()
	got, err := b.Get(b.Context(), name)
	b.Must(err)
	return oldcsi.Condition(got.GetStatus())
}

// capacity is what the pool can still promise.
func (b *bench) capacity() int64 {
	b.Helper()
	got, err := b.Capacity(b.Context(), "local")
	b.Must(err)
	return got
}

// wantSpace expects driver and df to report a published volume's size, and what of it
// is in use but for the slack.
func (b *bench) wantSpace(name, pod string, size, used int64) {
	b.Helper()
	b.settle()
	got, err := b.Stats(b.Context(), name, pod)
	b.Must(err)
	bytes := got.GetUsage()[0]
	// Less than the largest block of a filesystem takes no write of one.
	if full := bytes.GetAvailable() < 64<<10; bytes.GetUnit() != csi.VolumeUsage_BYTES || oldcsi.Condition(got).GetAbnormal() != full {
		b.Errorf("stats of %s: %v, want bytes, and the condition abnormal if it is full", name, got)
	}
	b.wantNumbers("NodeGetVolumeStats of "+name, bytes.GetTotal(), bytes.GetUsed(), bytes.GetAvailable(), size, used)
	if !b.fs.statfsTellsLimit {
		return
	}
	var s unix.Statfs_t
	b.Must(unix.Statfs(b.Target(pod), &s))
	block := uint64(s.Bsize)
	b.wantNumbers("statfs of "+name, int64(s.Blocks*block), int64((s.Blocks-s.Bfree)*block), int64(s.Bavail*block), size, used)
}

func (b *bench) wantNumbers(what string, size, used, free, wantSize, wantUsed int64) {
	b.Helper()
	if size != wantSize || used < wantUsed-b.fs.slack() || used > wantUsed+b.fs.slack() || free != size-used {
		b.Errorf("%s: %d bytes, %d used and %d free; want %d, %d used", what, size, used, free, wantSize, wantUsed)
	}
}

// settle brings the filesystem's numbers up to date.
func (b *bench) settle() {
	b.Helper()
	if b.fs.kind == quota.Btrfs {
		// This also wakes who clears away removed subvolumes, every 30 seconds else.
		const sync = 0x94<<8 | 8 // BTRFS_IOC_SYNC of linux/btrfs.h
		b.Must(unix.IoctlSetInt(b.root.Fd(), sync, 0))
		return
	}
	b.Must(unix.Syncfs(b.root.Fd()))
}

// open opens a volume's directory in the pool.
func (b *bench) open(name string) *dir.Dir {
	b.Helper()
	d, err := b.root.Open(name)
	b.Must(err)
	return d
}

func (b *bench) idOf(name string) quota.ID {
	b.Helper()
	d := b.open(name)
	defer func() { b.Must(d.Close()) }()
	id, err := b.facility.IDOf(d)
	b.Must(err)
	return id
}

// limit is what the kernel holds a volume to.
func (b *bench) limit(name string) quota.Limit {
	b.Helper()
	usage, err := b.facility.Usage(b.root, b.ids[name])
	b.Must(err)
	return usage.Limit
}

// removeAll deletes the volumes that were made and expects the kernel to forget them.
func (b *bench) removeAll() {
	b.Helper()
	b.Together(slices.Collect(maps.Keys(b.ids)), b.delete)
	b.AwaitNoTrash(b.pool)
	for name, id := range b.ids {
		b.Eventually("what the kernel knows of "+name+" is gone", func() bool {
			usage, err := b.facility.Usage(b.root, id)
			b.Must(err)
			if usage.Limit == (quota.Limit{}) && usage.Bytes == 0 {
				return true
			}
			b.settle()
			return false
		})
	}
	// The driver's own directory begins with a dot.
	if left, err := filepath.Glob(filepath.Join(b.pool, "[^.]*")); err != nil || len(left) > 0 {
		b.Errorf("left in the pool: %q, %v", left, err)
	}
	clear(b.ids)
}
