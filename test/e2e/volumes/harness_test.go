package volumes

import (
	"maps"
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

// A harness is a driver with one pool, and what of it a check has in use.
type harness struct {
	*drivertest.Driver
	fs       filesystem
	program  string
	mounted  string
	pool     string
	facility quota.Facility
	root     *dir.Dir // of the pool

	ids map[string]quota.ID // of the volumes that were made
}

// newHarness starts a driver on an empty pool whose sizes it has to keep.
func newHarness(t *testing.T, program string, fs filesystem, mounted string) *harness {
	t.Helper()
	h := &harness{fs: fs, program: program, mounted: mounted, ids: make(map[string]quota.ID)}
	var err error
	h.pool = drivertest.NewPool(t, mounted)
	h.root, err = dir.Open(h.pool)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, h.root.Close()) })
	h.facility, err = quota.Detect(h.root)
	must.Succeed(t, err)
	if h.facility.Kind() != fs.kind {
		t.Fatalf("the limits of %s are kept by %s, want %s", mounted, h.facility.Kind(), fs.kind)
	}
	h.Driver = drivertest.Start(t, h.config("root"))
	return h
}

// config runs the driver on the pool; relabel is the pool option of that name.
func (h *harness) config(relabel string) drivertest.Config {
	return drivertest.Config{
		Binary: h.program,
		Pools:  []drivertest.PoolConfig{{Name: "local", Path: h.pool, Enforcement: "required", Relabel: relabel, Reserve: h.fs.reserve}},
	}
}

func volume(name string, bytes int64) drivertest.Volume {
	return drivertest.Volume{ID: name, Pool: "local", Bytes: bytes}
}

// create makes a volume and expects the driver to report that its size is enforced.
func (h *harness) create(name string, bytes int64) {
	h.Helper()
	h.Must(h.CreateEnforced(volume(name, bytes)))
	h.ids[name] = h.idOf(name)
}

func (h *harness) delete(name string) error { return h.Delete(h.Context(), name) }

// publish publishes as kubelet does, and answers the path.
func (h *harness) publish(name, pod string) string { return h.MustPublish(volume(name, 0), pod) }

func (h *harness) expand(name, pod string, bytes int64) error {
	return h.ExpandExactly(volume(name, bytes), pod)
}

// condition is what the driver says of a volume.
func (h *harness) condition(name string) *oldcsi.VolumeCondition {
	h.Helper()
	got := must.Value(h.Get(h.Context(), name))(h)
	return oldcsi.Condition(got.GetStatus())
}

// wantSpace expects driver and df to report a published volume's size, and what of it
// is in use but for the slack.
func (h *harness) wantSpace(name, pod string, size, used int64) {
	h.Helper()
	h.settle()
	got := must.Value(h.Stats(h.Context(), name, pod))(h)
	bytes := got.GetUsage()[0]
	// Less than the largest block of a filesystem takes no write of one.
	if full := bytes.GetAvailable() < 64<<10; bytes.GetUnit() != csi.VolumeUsage_BYTES || oldcsi.Condition(got).GetAbnormal() != full {
		h.Errorf("stats of %s: %v, want bytes, and the condition abnormal if it is full", name, got)
	}
	h.wantNumbers("NodeGetVolumeStats of "+name, bytes.GetTotal(), bytes.GetUsed(), bytes.GetAvailable(), size, used)
	if !h.fs.statfsTellsLimit {
		return
	}
	var s unix.Statfs_t
	h.Must(unix.Statfs(h.Target(pod), &s))
	block := uint64(s.Bsize)
	h.wantNumbers("statfs of "+name, int64(s.Blocks*block), int64((s.Blocks-s.Bfree)*block), int64(s.Bavail*block), size, used)
}

func (h *harness) wantNumbers(what string, size, used, free, wantSize, wantUsed int64) {
	h.Helper()
	if size != wantSize || used < wantUsed-h.fs.slack() || used > wantUsed+h.fs.slack() || free != size-used {
		h.Errorf("%s: %d bytes, %d used and %d free; want %d, %d used", what, size, used, free, wantSize, wantUsed)
	}
}

// settle brings the filesystem's numbers up to date.
func (h *harness) settle() {
	h.Helper()
	if h.fs.kind == quota.Btrfs {
		// This also wakes who clears away removed subvolumes, every 30 seconds else.
		const sync = 0x94<<8 | 8 // BTRFS_IOC_SYNC of linux/btrfs.h
		h.Must(unix.IoctlSetInt(h.root.Fd(), sync, 0))
		return
	}
	h.Must(unix.Syncfs(h.root.Fd()))
}

// open opens a volume's directory in the pool.
func (h *harness) open(name string) *dir.Dir {
	h.Helper()
	d := must.Value(h.root.Open(name))(h)
	return d
}

func (h *harness) idOf(name string) quota.ID {
	h.Helper()
	d := h.open(name)
	defer func() { h.Must(d.Close()) }()
	id := must.Value(h.facility.IDOf(d))(h)
	return id
}

// limit is what the kernel holds a volume to.
func (h *harness) limit(name string) quota.Limit {
	h.Helper()
	usage := must.Value(h.facility.Usage(h.root, h.ids[name]))(h)
	return usage.Limit
}

// removeAll deletes the volumes that were made and expects the kernel to forget them.
func (h *harness) removeAll() {
	h.Helper()
	h.Together(slices.Collect(maps.Keys(h.ids)), h.delete)
	h.WantEmpty(h.pool)
	for name, id := range h.ids {
		h.Eventually("what the kernel knows of "+name+" is gone", func() bool {
			usage := must.Value(h.facility.Usage(h.root, id))(h)
			if usage.Limit == (quota.Limit{}) && usage.Bytes == 0 {
				return true
			}
			h.settle()
			return false
		})
	}
	clear(h.ids)
}
